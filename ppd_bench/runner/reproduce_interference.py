"""``reproduce figure2``, ``figure7`` and ``figure8``: the interference study beside the paper's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pandas as pd

from ppd_bench.report.text_table import TextTable
from ppd_bench.report.units import ms, percent
from ppd_bench.runner.interference import InterferenceRequest, run_interference
from ppd_bench.runner.reproduce import published_figures
from ppd_bench.runner.reproduce_parts import NOT_PAPERS, Compared, Part, PartRequest, Tell

PAPER_BATCH = 200
"""At which Figures 2 and 7 give their numbers."""
CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536)
FIGURE8_BATCH = 32
LONG = InterferenceRequest(
    batches=(FIGURE8_BATCH,), totals=CONTEXTS, n_prefills=(1,), append_tokens=64, budgets=(512, 8192), window_tokens=16
)
QUICK = InterferenceRequest(batches=(8, PAPER_BATCH), budgets=(512, 8192))
QUICK_LONG = dataclasses.replace(LONG, totals=(2048, 32768, 65536))

DATA = f"made mixes of decodes and prefills ({NOT_PAPERS})"
MEANING = (
    "An append of 1,024 new tokens costs at least what a full prefill of 1,024 does, so +48 % against +2 % cannot both "
    "be 1,024 new "
    "tokens: here both prompts are 1,024 tokens long, and an append computes the last few of them."
)
KNOB = (
    "max_num_batched_tokens decides how much of a prefill one step carries, and the window decides over how many "
    "tokens the loss is "
    "spread; the paper gives neither, so order and ratio can be compared and digits cannot."
)


def figure2(request: PartRequest, tell: Tell) -> Part:
    """One prefill beside a decode batch."""
    return _by_batch(request, tell, key="figure2", n_prefills=1, published="figure2_tpot_slowdown_pct")


def figure7(request: PartRequest, tell: Tell) -> Part:
    """Four prefills beside a decode batch."""
    return _by_batch(request, tell, key="figure7", n_prefills=4, published="figure7_tpot_slowdown_pct")


def _by_batch(request: PartRequest, tell: Tell, *, key: str, n_prefills: int, published: str) -> Part:
    from ppd_bench.report.interference_plot import interference_plots

    wish = QUICK if request.quick else InterferenceRequest()
    frame = _frame(wish, request, "interference", tell)
    frame = frame[frame["n_prefills"] == n_prefills]
    told = published_figures()[published]
    at = frame[frame["n_decode"] == PAPER_BATCH]
    return Part(
        key=key,
        title=f"Figure {key.removeprefix('figure')}: slowdown of running decodes by {n_prefills} prefill{'s' * (n_prefills > 1)}",
        data=DATA,
        compared=_compared(at, told),
        differences=(MEANING, KNOB, _ratios(at, told)),
        assumptions=(
            f"running decodes have prompts of {wish.decode_context_tokens} tokens; an append computes "
            f"{wish.append_tokens} tokens over the rest",
            f"the window is {wish.window_tokens} tokens; carrying steps are those that the prefills' tokens fill",
        ),
        frames={"slowdowns": frame},
        tables=(_table(frame),),
        plots=tuple(interference_plots(frame, evidence="simulated")),
        folder=request.folder / key,
    )


def figure8(request: PartRequest, tell: Tell) -> Part:
    """One prefill of 2k to 64k tokens beside a decode batch."""
    from ppd_bench.report.interference_plot import interference_plots

    wish = QUICK_LONG if request.quick else LONG
    frame = _frame(wish, request, "interference-long", tell)
    told = published_figures()["figure8"]
    low, high = told["full_slowdown_x_32k"]
    compared = []
    for budget, rows in frame.groupby("max_num_batched_tokens", sort=False):
        cells = rows.set_index(["kind", "context_tokens"])
        at, slowest = cells["carrying_slowdown_ratio"], cells["step_slowdown_ratio"]
        compared += [
            Compared(
                what=f"full prefill of 32k, budget {budget}: decode step against before", unit="x", published=(low, high),
                simulated=1 + float(at["full", 32768]), papers_data=False,
            ),
            Compared(
                what=f"the same, its slowest step, budget {budget}", unit="x", published=(low, high),
                simulated=1 + float(slowest["full", 32768]), papers_data=False,
            ),
            Compared(
                what=f"append of {wish.append_tokens} over 64k, budget {budget}: slowdown", unit="%", published=(),
                words=f"below {told['append_below_pct_64k']}", simulated=100 * float(at["append", 65536]), papers_data=False,
            ),
        ]  # fmt: skip
    return Part(
        key="figure8",
        title="Figure 8: slowdown of running decodes by context length",
        data=DATA,
        compared=tuple(compared),
        differences=(
            KNOB,
            "A chunk of a long prefill attends to all that was prefilled before it, so its steps grow with the "
            "context; the steps of an "
            "append grow with the context too, by its few new tokens only.",
        ),
        assumptions=(
            f"{FIGURE8_BATCH} running decodes with prompts of {wish.decode_context_tokens} tokens: the paper does not "
            "say how many",
            "the slowdown is the mean of the steps that carry the prefill",
        ),
        frames={"slowdowns": frame},
        tables=(_table(frame),),
        plots=tuple(interference_plots(frame, evidence="simulated")),
        folder=request.folder / "figure8",
    )


def _frame(wish: InterferenceRequest, request: PartRequest, name: str, tell: Tell) -> pd.DataFrame:
    wish = dataclasses.replace(wish, n_processes=request.n_processes, out=request.folder / name)
    return run_interference(wish, tell).frame


def _compared(at: pd.DataFrame, told: dict[str, float]) -> tuple[Compared, ...]:
    return tuple(
        Compared(
            what=f"{r['kind']} prefill, batch {r['n_decode']}, budget {r['max_num_batched_tokens']}: {words}", unit="%",
            published=(float(told[r["kind"]]),), simulated=100 * float(r[column]), papers_data=False,
        )
        for r in at.to_dict("records")
        for column, words in (("carrying_slowdown_ratio", "carrying steps"), ("window_slowdown_ratio", "window"))
    )  # fmt: skip


def _ratios(at: pd.DataFrame, told: dict[str, float]) -> str:
    by = at.set_index(["max_num_batched_tokens", "kind"])["carrying_slowdown_ratio"]
    found = [
        f"{by[budget, 'full'] / by[budget, 'append']:.1f} at budget {budget}"
        for budget in dict.fromkeys(at["max_num_batched_tokens"])
    ]
    return (
        f"Full against append at batch {PAPER_BATCH}, over the carrying steps: {', '.join(found)}; published "
        f"{told['full'] / told['append']:.1f}."
    )


def _table(frame: pd.DataFrame) -> TextTable:
    columns: Sequence[str] = ("carrying_slowdown_ratio", "step_slowdown_ratio", "window_slowdown_ratio")
    rows = tuple(
        (f"{r['max_num_batched_tokens']}", f"{r['n_decode']}", f"{r['context_tokens']:,}", f"{r['n_prefills']} {r['kind']}",
         ms(r["baseline_tpot_s"]), *(percent(r[name]) for name in columns), ms(r["excess_s"]))
        for r in frame.to_dict("records")
    )  # fmt: skip
    head = (
        "budget",
        "decodes",
        "prompt",
        "prefills",
        "TPOT before",
        "carrying steps",
        "slowest step",
        "window",
        "lost",
    )
    return TextTable(caption="All mixes", head=head, rows=rows)
