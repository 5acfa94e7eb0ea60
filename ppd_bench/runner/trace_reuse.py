"""``ppd-bench trace reuse``: how much prefix reuse a trace allows, what a cache of each size and each routing policy realise of
it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppd_bench.analysis.reuse import Reuse, reuse
from ppd_bench.analysis.reuse_distance import Curve, lru_curve
from ppd_bench.analysis.reuse_instances import POLICIES, SEES, InstanceReuse, Sees, Service, instance_reuse
from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import plain
from ppd_bench.runner.trace_rows import load_blocks
from ppd_bench.store.atomic import make_folder, write_bytes
from ppd_bench.sweep.names import resolve_model
from ppd_bench.sweep.quantity import parse_size
from ppd_bench.workload.strict_model import Origin
from ppd_bench.workload.traces import Trace

INSTANCES = (2, 4, 8)
BASIS = "computed from the trace's block ids; times in flight are assumed where a policy looks at load"
UNTIMED_NOTE = (
    "without arrival times requests come one after another in the source's order: no policy sees load, and cache_aware gathers "
    "whatever shares a prefix on one instance"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseRequest:
    """What is asked of a trace.

    ``model`` gives sizes in GiB. ``capacities``: cache sizes of one instance as text, ``500000`` (tokens) or ``28GiB`` (needs a
    model). ``rate``: share of blocks whose distances are computed; null chooses by the trace's size.
    """

    sessions: str = "chain"
    model: str | None = None
    capacities: tuple[str, ...] = ()
    policies: tuple[str, ...] = POLICIES
    instances: tuple[int, ...] = INSTANCES
    rate: float | None = None
    service: Service = Service()
    sees: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseResult:
    """Everything that ``trace reuse`` tells. ``kv_bytes_per_token`` is null without a model."""

    source: str
    format_name: str
    token_count: str
    sessions: str
    model: str | None
    kv_bytes_per_token: int | None
    service: Service
    reuse: Reuse
    curve: Curve
    instances: tuple[InstanceReuse, ...]
    notes: tuple[str, ...]

    def to_json(self) -> str:
        """All figures; names are those of the dataclasses, units are in the names."""
        content: dict[str, Any] = {"basis": BASIS, **plain(self)}
        return json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n"


def trace_reuse(trace: Trace, request: ReuseRequest) -> ReuseResult:
    """The verb.

    Raises:
        SpecError: every unusable argument, or a trace without block ids.
    """
    kv_bytes = _kv_bytes_per_token(request.model)
    capacities = _capacities(request.capacities, kv_bytes)
    _check(request)
    sees = _sees(request.sees)
    blocks = load_blocks(trace, request.sessions)
    found = reuse(blocks)
    curve = lru_curve(blocks, capacities, rate=request.rate)
    results: list[InstanceReuse] = []
    for policy in request.policies:
        for n in request.instances:
            results += instance_reuse(
                blocks, policy, n, possible_ratio=found.hit_ratio, capacities_tokens=capacities,
                service=request.service, sees=sees, seed=request.seed, rate=curve.rate,
            )  # fmt: skip
    return ReuseResult(
        source=trace.source,
        format_name=trace.format.name,
        token_count=trace.format.token_count,
        sessions=_sessions(found, request, trace),
        model=request.model,
        kv_bytes_per_token=kv_bytes,
        service=request.service,
        reuse=found,
        curve=curve,
        instances=tuple(results),
        notes=(*trace.notes, *([] if blocks.has_arrivals or not results else [UNTIMED_NOTE])),
    )


def write_reuse(result: ReuseResult, folder: Path) -> list[Path]:
    """``reuse.json`` and the plots in a folder, which is made.

    Raises:
        StoreError: it cannot be written.
    """
    from ppd_bench.report.reuse_plots import figure_curve, figure_instances  # matplotlib takes a second
    from ppd_bench.report.style import save

    make_folder(folder)
    path = folder / "reuse.json"
    write_bytes(path, result.to_json().encode())
    name = Path(result.source).name
    curve = figure_curve(result.reuse, result.curve, source=name, kv_bytes_per_token=result.kv_bytes_per_token)
    paths = [path, *save(curve, folder / "cache-size")]
    if result.instances:
        figure = figure_instances(result.reuse.hit_ratio, result.instances, source=name)
        paths += save(figure, folder / "instances")
    return paths


def _sees(name: str | None) -> Sees | None:
    found = next((known for known in SEES if known == name), None)
    if name is not None and found is None:
        raise SpecError(f"command line: --router-sees {name!r} is not known; allowed: {', '.join(SEES)}")
    return found


def _sessions(found: Reuse, request: ReuseRequest, trace: Trace) -> str:
    if found.n_sessions is None:
        return "none"
    recorded = next(trace.rows()).session_id is not None
    return "recorded" if recorded else f"derived from block ids by the rule {request.sessions!r}"


def _kv_bytes_per_token(model: str | None) -> int | None:
    profile, problems = resolve_model(model, Origin(file="command line", overridden=frozenset({("model",)})))
    if problems:
        raise SpecError(problems)
    return profile.kv_bytes_per_token if profile else None


def _capacities(texts: tuple[str, ...], kv_bytes_per_token: int | None) -> tuple[float, ...]:
    """Cache sizes in tokens.

    Raises:
        SpecError: every one that is neither a number of tokens nor a size in bytes of a known model.
    """
    found: list[float] = []
    problems: list[str] = []
    for text in texts:
        place = f"command line: --capacity {text.strip()!r}"
        try:
            if text.strip().isdigit():
                found.append(float(text))
            elif kv_bytes_per_token is None:
                problems.append(f"{place}: a size in bytes needs --model; or give tokens, such as 500000")
            else:
                found.append(parse_size(text.strip()) / kv_bytes_per_token)
        except ValueError as error:
            problems.append(f"{place}: {error}; allowed: tokens such as 500000, or a size such as 28GiB")
    problems += [f"command line: --capacity {n:g}; allowed: above 0" for n in found if n <= 0]
    if problems:
        raise SpecError(problems)
    return tuple(found)


def _check(request: ReuseRequest) -> None:
    problems = [f"command line: --instances {n}; allowed: 1 or more" for n in request.instances if n < 1]
    if request.rate is not None and not 0.0 < request.rate <= 1.0:
        problems.append(f"command line: --rate {request.rate:g}; allowed: above 0, at most 1")
    rates = (request.service.prefill_tokens_per_s, request.service.decode_tokens_per_s)
    problems += [f"command line: --service {rate:g}; allowed: above 0" for rate in rates if rate <= 0]
    if problems:
        raise SpecError(problems)
