"""Recorded traffic for points: from a file to a workload, and from a point to its conversations."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import Point
from ppd_bench.core.trace import RowCounts, TraceFormat
from ppd_bench.core.workload import Arrivals, Loop, Session, TrafficSpec, WorkloadSpec
from ppd_bench.runner.trace_rows import with_sessions
from ppd_bench.sweep.datasets import DatasetKeys
from ppd_bench.workload.generate import generate_sessions
from ppd_bench.workload.spec import DEFAULT_MAX_OUTPUT_TOKENS
from ppd_bench.workload.thinning import Thinning
from ppd_bench.workload.traces import Trace, open_trace
from ppd_bench.workload.traffic import Recording, SourceFile, check_playable, record, traffic_sessions

RECORDED_CATEGORY = "recorded"
_HASH_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficWish:
    """How recorded traffic is to be played; see ``core.workload.TrafficSpec``. ``loop`` null is the trace's own.

    ``sessions``: ``chain`` joins requests of a trace without sessions (``analysis.trace_sessions``), ``none`` leaves each alone.
    """

    path: Path
    format: str | None = None
    tokenizer: Path | None = None
    block_tokens: int | None = None
    name: str | None = None
    sessions: str = "chain"
    loop: Loop | None = None
    arrivals: Arrivals = "recorded"
    time_scale: float = 1.0
    max_request_tokens: int | None = None
    max_requests: int | None = None
    max_inflight_sessions: int | None = None
    reuse_ratio: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What of a trace is played, and as what conversations and contents."""

    sessions: str
    max_request_tokens: int | None
    max_requests: int | None
    reuse_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Recorded traffic, read: the workload that stands for it, what was read and left out, and remarks of the reader."""

    workload: WorkloadSpec
    source: SourceFile
    recording: Recording
    counts: RowCounts
    notes: tuple[str, ...]

    @property
    def spec(self) -> TrafficSpec:
        assert self.workload.traffic is not None
        return self.workload.traffic


def read_traffic(wish: TrafficWish) -> Traffic:
    """Read a trace once and say what it amounts to.

    Raises:
        SpecError: the file cannot be read, nothing of it can be played, or wishes that contradict it, such as recorded arrivals
            of a file without any.
    """
    if not wish.time_scale > 0.0:
        raise SpecError(f"command line: --time-scale {wish.time_scale:g} cannot be used; allowed: above 0")
    source = SourceFile(
        sha256=hash_of(wish.path),
        path=str(wish.path),
        format=wish.format,
        tokenizer=None if wish.tokenizer is None else str(wish.tokenizer),
        block_tokens=wish.block_tokens,
    )
    trace = _open(source)
    selection = Selection(
        sessions=wish.sessions,
        max_request_tokens=wish.max_request_tokens,
        max_requests=wish.max_requests,
        reuse_ratio=wish.reuse_ratio,
    )
    recording = _record(trace, selection)
    figures = recording.figures
    longest = max(row.output_tokens for family in recording.families for thread in family for row in thread.rows)
    spec = TrafficSpec(
        source=wish.path.name,
        sha256=source.sha256,
        reading=_reading(trace.format, wish.tokenizer),
        sessions=wish.sessions,
        loop=wish.loop or trace.format.loop,
        arrivals=wish.arrivals,
        time_scale=wish.time_scale,
        max_request_tokens=wish.max_request_tokens,
        max_requests=wish.max_requests,
        max_inflight_sessions=wish.max_inflight_sessions,
        reuse_ratio=wish.reuse_ratio,
        figures=figures,
    )
    check_playable(recording, spec)
    workload = WorkloadSpec(
        name=wish.name or _name_of(wish.path),
        category=RECORDED_CATEGORY,
        turns=(),
        max_output_tokens=max(DEFAULT_MAX_OUTPUT_TOKENS, longest),
        traffic=spec,
    )
    return Traffic(
        workload=workload,
        source=source,
        recording=recording,
        counts=_all_counts(trace, recording),
        notes=tuple(trace.notes),
    )


def read_dataset(keys: DatasetKeys) -> Traffic:
    """Recorded traffic as an entry of a sweep describes it.

    Raises:
        SpecError: as ``read_traffic``.
    """
    return read_traffic(
        TrafficWish(
            path=Path(keys.dataset),
            format=keys.format,
            tokenizer=None if keys.tokenizer is None else Path(keys.tokenizer),
            block_tokens=keys.block_tokens,
            name=keys.name,
            sessions=keys.sessions,
            loop=keys.loop,
            arrivals=keys.arrivals,
            time_scale=keys.time_scale,
            max_request_tokens=keys.max_request_tokens,
            max_requests=keys.max_requests,
            max_inflight_sessions=keys.max_inflight_sessions,
        )
    )


def told(traffic: Traffic) -> list[str]:
    """What people should know of recorded traffic that is played: an account of its rows, and the reader's remarks."""
    counts = traffic.counts
    dropped = "; ".join(f"{n:,} x {reason}" for reason, n in counts.dropped.items())
    head = f"{traffic.spec.source}: {counts.n_read:,} requests read, {counts.n_kept:,} kept"
    return [
        f"{head}, left out: {dropped}" if dropped else head,
        *(f"{traffic.spec.source}: {note}" for note in traffic.notes),
    ]


def sessions_of(point: Point, sources: Sequence[SourceFile] = ()) -> tuple[Session, ...]:
    """The conversations of a point, synthetic or recorded: the same for every arm of a comparison and for both executors.

    Raises:
        SpecError: the point's traffic is not among the sources, or its file has changed.
    """
    return _sessions(
        point.workload,
        point.qps,
        point.duration_s,
        point.think_time_s,
        point.seed,
        point.repeat,
        _source(point.workload.traffic, sources),
    )


@functools.lru_cache(maxsize=4)
def _sessions(
    workload: WorkloadSpec,
    qps: float,
    duration_s: float,
    think_time_s: float,
    seed: int,
    repeat: int,
    source: SourceFile | None,
) -> tuple[Session, ...]:
    if workload.traffic is None or source is None:
        return generate_sessions(
            workload, qps=qps, duration_s=duration_s, think_time_s=think_time_s, seed=seed, repeat=repeat
        )
    traffic = workload.traffic
    return traffic_sessions(
        _recording(
            source,
            Selection(
                sessions=traffic.sessions,
                max_request_tokens=traffic.max_request_tokens,
                max_requests=traffic.max_requests,
                reuse_ratio=traffic.reuse_ratio,
            ),
        ),
        traffic,
        qps=qps,
        duration_s=duration_s,
        think_time_s=think_time_s,
        seed=seed,
        repeat=repeat,
        max_output_tokens=workload.max_output_tokens,
    )


def _source(traffic: TrafficSpec | None, sources: Sequence[SourceFile]) -> SourceFile | None:
    if traffic is None:
        return None
    source = next((source for source in sources if source.sha256 == traffic.sha256), None)
    if source is None:
        raise SpecError(
            f"{traffic.source}: this recorded traffic is not at hand (SHA-256 {traffic.sha256[:12]}...); give the "
            "file that the run was "
            "begun with"
        )
    return source


@functools.lru_cache(maxsize=2)
def _recording(source: SourceFile, selection: Selection) -> Recording:
    if hash_of(Path(source.path)) != source.sha256:
        raise SpecError(f"{source.path}: has changed since it was read; give the command again")
    return _record(_open(source), selection)


def _open(source: SourceFile) -> Trace:
    tokenizer = None if source.tokenizer is None else Path(source.tokenizer)
    return open_trace(source.path, format=source.format, tokenizer=tokenizer, block_tokens=source.block_tokens)


def _record(trace: Trace, selection: Selection) -> Recording:
    block_tokens = trace.format.block_tokens
    rows = trace.rows()
    if block_tokens is not None and selection.sessions == "chain":
        rows = with_sessions(rows, block_tokens)
    if block_tokens is not None and selection.reuse_ratio < 1.0:
        rows = Thinning(selection.reuse_ratio).rows(rows)
    return record(
        rows,
        block_tokens=block_tokens,
        max_request_tokens=selection.max_request_tokens,
        max_requests=selection.max_requests,
    )


def _all_counts(trace: Trace, recording: Recording) -> RowCounts:
    """The reader's and the player's, as one account of the source's rows."""
    counts = RowCounts(n_read=trace.counts.n_read, n_kept=recording.counts.n_kept)
    for dropped in (trace.counts.dropped, recording.counts.dropped):
        for reason, n in dropped.items():
            counts.drop(reason, n)
    return counts


def _reading(declared: TraceFormat, tokenizer: Path | None) -> str:
    """How the file was read: what else its rows depend on."""
    blocks = f", blocks of {declared.block_tokens}" if declared.block_tokens else ""
    by = f" {hash_of(tokenizer)[:16]}" if tokenizer is not None else ""
    return f"{declared.name}{blocks}, tokens {declared.token_count}{by}"


def _name_of(path: Path) -> str:
    """A workload's name from a file's."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._")
    return name or "trace"


def hash_of(path: Path) -> str:
    """SHA-256 of a file's content, or of a folder's files and their names.

    Raises:
        SpecError: it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            if path.is_dir():
                digest.update(f"{file.relative_to(path)}\0{file.stat().st_size}\0".encode())
            _update(digest, file)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def _update(digest: hashlib._Hash, file: Path) -> None:
    with file.open("rb") as stream:
        while chunk := stream.read(_HASH_CHUNK):
            digest.update(chunk)
