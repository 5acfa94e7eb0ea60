"""The agentic study in tables and sentences: simulated beside published, and why they differ."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ppd_bench.analysis.breakdown import FULL_KV_RATIO, STAGES
from ppd_bench.analysis.metrics import floats
from ppd_bench.core.enums import Executor
from ppd_bench.report.text_table import TextTable
from ppd_bench.runner.study_figures import SHORT_PROMPT_TOKENS, PointFigures
from ppd_bench.runner.study_points import N_GPUS, Case

if TYPE_CHECKING:
    from ppd_bench.runner.study import Study

UNKNOWN = "–"

Arms = Sequence[tuple[Case, PointFigures]]
"""Arms with their figures, in order."""


def subtitle(study: Study) -> str:
    """What was played, in one sentence, and what was left out."""
    spec, figures = study.traffic.spec, study.traffic.recording.figures
    dropped = "; ".join(f"{n:,} x {reason}" for reason, n in study.traffic.counts.dropped.items())
    return (
        f"{figures.n_requests:,} requests of {figures.n_sessions:,} conversations, prompts "
        f"{figures.prompt_tokens:,.0f} and answers "
        f"{figures.output_tokens:,.0f} tokens on average, loop {spec.loop}, times divided by {spec.time_scale:g}, at most "
        f"{study.setup.max_inflight_sessions} conversations in flight, time-out {study.setup.timeout_s:g} s. "
        f"Read as {spec.reading}: {study.traffic.counts.n_read:,} requests; left out: {dropped or 'none'}."
    )


def main_tables(study: Study) -> list[TextTable]:
    """Tables 3.1 to 3.3, 4.3 and 4.4 of the study; each cell is simulated, with the published figure in brackets."""
    arms = study.main()
    tables = [_results(study, arms), _loads(study, arms), _stages(study, arms), _waits(study, arms), _changes(study)]
    return [*tables, *_measured(study)]


def _measured(study: Study) -> list[TextTable]:
    """Tables 3.1 to 3.3 again for the arms that engines played, and 4.3 where they tell when waits ended."""
    arms = [(one.case, one.figures) for one in study.measured]
    if not arms:
        return []
    doubts = "; ".join(f"{one.case.arm.label} is invalid: {one.invalid}" for one in study.measured if one.invalid)
    makes = [_results, _loads, _stages, *([_waits] if any(found.short_wait for _, found in arms) else [])]
    first, *others = [make(study, arms, "measured on the engines given") for make in makes]
    return [dataclasses.replace(first, note=f"{first.note} {doubts}".rstrip()), *others]


def _results(study: Study, arms: Arms, evidence: str = "simulated") -> TextTable:
    rows = []
    for case, found in arms:
        s, told = found.summary, study.published["main"].get(case.arm.key, {})
        n_ok = f"{s['n_ok']:,.0f}/{s['n_scheduled']:,.0f}"
        rows.append((
            case.arm.label,
            f"{n_ok} ({told['n_ok']}/{told['n']})" if "n_ok" in told else f"{n_ok} ({UNKNOWN})",
            _seconds(s["ttft_p50_s"], told.get("ttft_p50_s")),
            _seconds(s["tpot_p90_s"], told.get("tpot_p90_s")),
            _seconds(s["e2e_p50_s"], told.get("e2e_p50_s")),
            _percent(s["prefix_hit_ratio"], told.get("apc_pct")),
            f"{found.start_wait_s:,.0f} s, longest {found.longest_start_wait_s:,.0f} s",
        ))  # fmt: skip
    return TextTable(
        caption=f"3.1 Main comparison: {evidence} (published)",
        head=("configuration", "OK/N", "TTFT p50", "TPOT p90", "E2E p50", "APC", "waited to start"),
        rows=tuple(rows),
        note="Waited to start: conversations that were held back because as many as allowed were in flight; it is in no TTFT. An "
        f"infinite cache would find {100 * arms[0][1].possible_hit_ratio:.1f} % of these prompts in earlier prompts; "
        "answers that come back in a later prompt, which APC counts as well, are not in that.",
    )


def _loads(study: Study, arms: Arms, evidence: str = "simulated") -> TextTable:
    rows = []
    for case, found in arms:
        told = study.published["load"].get(case.arm.key, {})
        everyone, prefill, decode = found.load("all"), found.load("P"), found.decode_load
        rows.append((
            case.arm.label,
            _percent(everyone.busy_ratio if everyone else None, told.get("busy_all_pct")),
            _percent(prefill.busy_ratio, told.get("busy_prefill_pct")) if prefill else UNKNOWN,
            _percent(decode.busy_ratio, told.get("busy_decode_pct")) if prefill and decode else UNKNOWN,
            _percent(decode.kv_mean_ratio if decode else None, told.get("decode_kv_pct")),
            _percent(decode.kv_max_ratio if decode else None, None),
            _percent(decode.kv_full_ratio if decode else None, None),
        ))  # fmt: skip
    return TextTable(
        caption=f"3.2 Engines: {evidence} (published)",
        head=("configuration", "busy, all", "busy, P", "busy, D", "decode KV mean", "decode KV max",
              f"decode KV > {FULL_KV_RATIO:.0%}"),
        rows=tuple(rows),
        note="Busy: share of the time with a step under way (published: GPU utilisation). Decode KV: blocks that "
        "requests hold on the "
        "engines that generate, read every second; what is merely cached counts as free.",
    )  # fmt: skip


def _stages(study: Study, arms: Arms, evidence: str = "simulated") -> TextTable:
    names = [name.removesuffix("_s") for name in STAGES]
    rows = [
        (case.arm.label, *(_share(case, found, name) for name in names), _told_stages(study, case))
        for case, found in arms
    ]
    return TextTable(
        caption=f"3.3 Share of TTFT by stage, {evidence}",
        head=("configuration", *(name.replace("_", " ") for name in names), "published"),
        rows=tuple(rows),
        note="Sum of the stage over the sum of TTFT of ok turns. Decode wait: from P's last prefill step to the "
        "start of the transfer.",
    )


def _share(case: Case, found: PointFigures, stage: str) -> str:
    """Of a simulated arm, a stage that no turn has is 0; engines do not tell all stages apart."""
    told = any(one.stage == stage for one in found.stages)
    return _percent(found.stage_share_ratio(stage), None) if told or case.point.executor is Executor.SIM else UNKNOWN


def _told_stages(study: Study, case: Case) -> str:
    told = study.published["stages"].get(case.arm.key)
    if told is None:
        return UNKNOWN
    return f"prefill {told['prefill_pct']} %, KV pull and decode wait {told['kv_pull_and_decode_wait_pct']} %"


def _waits(study: Study, arms: Arms, evidence: str = "simulated") -> TextTable:
    rows = []
    for case, found in arms:
        wait = found.short_wait
        rows.append(
            (case.arm.label, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN)
            if wait is None
            else (
                case.arm.label,
                f"{wait.wait_s:,.2f} s",
                f"{wait.prompt_tokens:,}",
                f"{wait.behind_tokens:,}",
                wait.worker,
            )
        )
    told = study.published["head_of_line"]
    return TextTable(
        caption=f"4.3 Longest wait of a short prompt, {evidence}",
        head=("configuration", "waited", "its prompt (tokens)", "longest prompt there (tokens)", "engine"),
        rows=tuple(rows),
        note=f"Short: at most {SHORT_PROMPT_TOKENS:,} tokens. Published, 6P+2D: {told['prompt_tokens']} tokens "
        f"waited {told['wait_s']} s "
        f"behind {told['behind_tokens']:,}. KV memory per engine: {study.setup.capacity_tokens:,} tokens, "
        f"{study.setup.capacity_tokens * study.setup.model.kv_bytes_per_token / 1e9:.1f} GB "
        f"(published {study.published['kv_capacity_bytes_per_engine'] / 1e9:.0f} GB).",
    )


_CHANGE_LABELS = {
    "round_robin_to_cache_aware": "8R: round robin to cache-aware",
    "combined_to_pd": "8R cache-aware to 4P_4D",
    "4P_4D_to_6P_2D": "4P_4D to 6P_2D",
    "await_to_fire_and_forget": "6P_2D: await to fire and forget",
}


def _changes(study: Study) -> TextTable:
    keyed = study.changes.set_index(["change", "figure"])
    known = {name: dict(zip(keyed.index, floats(keyed, name), strict=True)) for name in ("simulated", "published")}
    rows = []
    for name, label in _CHANGE_LABELS.items():
        cells = []
        for figure, unit in (("ttft_pct", "%"), ("tpot_p90_pct", "%"), ("apc_points", "points")):
            simulated, published = known["simulated"][name, figure], known["published"][name, figure]
            cells.append(f"{simulated:+.0f} {unit} ({_signed(published)})")
        rows.append((label, *cells))
    return TextTable(
        caption="3.4 and 4.4 Changes: simulated (published)",
        head=("change", "TTFT p50", "TPOT p90", "APC"),
        rows=tuple(rows),
    )


def _signed(value: float) -> str:
    return UNKNOWN if math.isnan(value) else f"{value:+.0f}"


def _seconds(value: float | None, told: float | None) -> str:
    shown = UNKNOWN if value is None or math.isnan(value) else f"{value:,.3f} s"
    return f"{shown} ({UNKNOWN if told is None else told})"


def _percent(ratio: float | None, told: float | None) -> str:
    shown = UNKNOWN if ratio is None or math.isnan(ratio) else f"{100 * ratio:.1f} %"
    return shown if told is None else f"{shown} ({told})"


GENERATED = "It is generated from the study's published quantiles; what those leave open was chosen, not recorded."


def differences(study: Study) -> list[str]:
    """One sentence per known cause. What is a guess says so."""
    name = study.traffic.spec.source
    traffic = GENERATED if study.generated else f"It is {name}, whose lengths, reuse and pauses are its own."
    return [
        f"Traffic: the study's trace is not public, and this one is another. {traffic}",
        "TTFT: nobody has published kernels of this GPU, so its step cost is a roofline with the H100's efficiencies. Prefill of "
        "long prompts sets the level of every TTFT; ratios between arms are worth more than levels.",
        "TPOT: the study ran with --enforce-eager, where every kernel of every step is launched from Python. "
        "The step overhead here "
        f"is {1e3 * study.setup.sim.step_overhead_s:.1f} ms, that of captured graphs (--step-overhead sets it), so TPOT is lower "
        "and moves more where prefills interfere.",
        "OK/N: the study lost requests of P/D runs to a race between KV callbacks and aborted requests, which it patched (its "
        "Section 6). The simulator has no such fault: what fails here is a time-out, or a turn behind one.",
        _memory_wall(study),
        "Shares of TTFT: the study's 12.3 and 87.7 % cannot be shares of its 110.2 s (0.108 s is 0.1 % of that).",
        "Cache-aware routing: the study's score (ongoing tokens over mean load minus hit ratio, with session "
        "affinity) is applied "
        f"with weight 1 to what each of the {N_GPUS} engines was sent, block by block. The study does not publish its weight.",
        *_timeouts(study),
    ]


def _memory_wall(study: Study) -> str:
    setup, tokens = study.setup, study.traffic.recording.figures.prompt_tokens
    held_gb = setup.max_inflight_sessions * tokens * setup.model.kv_bytes_per_token / 1e9
    two_gb = 2 * setup.capacity_tokens * setup.model.kv_bytes_per_token / 1e9
    return (
        f"Memory wall: {setup.max_inflight_sessions} conversations in flight with the mean prompt hold "
        f"{held_gb:.0f} GB of KV, and "
        f"two D have {two_gb:.0f} GB. What fills D here is telling it at once (fire and forget), longer "
        "prompts, more in flight or "
        "less memory; the sweeps show each. Published usage of 97 % with nothing running would also follow from blocks that "
        "were never given back; that is a guess."
    )


def _timeouts(study: Study) -> list[str]:
    lost: list[tuple[Case, PointFigures]] = [
        (case, found) for case, found in study.main() if found.summary["n_ok"] < found.summary["n_scheduled"]
    ]
    if not lost:
        return []
    told = ", ".join(f"{case.arm.label} {found.summary['n_timeout']:,.0f}" for case, found in lost)
    return [
        f"Time-outs here (above {study.setup.timeout_s:g} s): {told}; later turns of those conversations are not sent."
    ]
