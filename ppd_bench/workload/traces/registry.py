"""Every reader by name, detection, and the one way to open a trace."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TypeVar

from ppd_bench.core.errors import SpecError
from ppd_bench.workload.traces.agentic_code import AGENTIC_CODE
from ppd_bench.workload.traces.azure import AZURE
from ppd_bench.workload.traces.bailian import BAILIAN
from ppd_bench.workload.traces.burstgpt import BURSTGPT
from ppd_bench.workload.traces.delta import DELTA
from ppd_bench.workload.traces.flat_sessions import FLAT_SESSIONS
from ppd_bench.workload.traces.mooncake import MOONCAKE
from ppd_bench.workload.traces.mt_bench import MT_BENCH
from ppd_bench.workload.traces.openai_messages import OPENAI_MESSAGES
from ppd_bench.workload.traces.own import PPD_JSONL, PPD_PARQUET
from ppd_bench.workload.traces.reader import TAILS, UNITS, Reader, ReadOptions
from ppd_bench.workload.traces.replay_sessions import REPLAY_SESSIONS
from ppd_bench.workload.traces.sharegpt import SHAREGPT
from ppd_bench.workload.traces.source import Head, Source, head_of, open_source
from ppd_bench.workload.traces.trace import Trace
from ppd_bench.workload.traces.wildchat import WILDCHAT

Word = TypeVar("Word", bound=str)

READERS: dict[str, Reader] = {
    "sharegpt": SHAREGPT,
    "wildchat": WILDCHAT,
    "openai_messages": OPENAI_MESSAGES,
    "replay_sessions": REPLAY_SESSIONS,
    "flat_sessions": FLAT_SESSIONS,
    "mt_bench": MT_BENCH,
    "mooncake": MOONCAKE,
    "bailian": BAILIAN,
    "delta": DELTA,
    "agentic_code": AGENTIC_CODE,
    "burstgpt": BURSTGPT,
    "azure": AZURE,
    "ppd_jsonl": PPD_JSONL,
    "ppd_parquet": PPD_PARQUET,
}


def open_trace(
    path: Path | str,
    *,
    format: str | None = None,
    tokenizer: Path | None = None,
    block_tokens: int | None = None,
    time_unit: str | None = None,
    tail: str | None = None,
) -> Trace:
    """Open recorded traffic: a file, or a folder of files of one format.

    Args:
        format: a name of ``READERS``; null detects it from the first entries.
        tokenizer: for formats of text: a tokenizer.json or a folder with one; null counts by an estimate that says so.
        block_tokens: recorded ids: their block size, where it is not the format's. Text: the blocks to hash (16).
        time_unit: ``s``, ``ms`` or ``us`` and ``tail``: ``ceil`` or ``floor``, of recorded times and ids, where they are not
        the format's.

    Raises:
        SpecError: nothing there, a format that cannot be told, an option that means nothing to it, data that is not what the
            format declares (block size, tail rule, unit of time), or not a single usable row. Says where and what to do.
    """
    options = ReadOptions(
        tokenizer=tokenizer,
        block_tokens=block_tokens,
        time_unit=_one_of("--time-unit", time_unit, UNITS),
        tail=_one_of("--tail", tail, TAILS),
    )
    source = open_source(Path(path))
    reader = _chosen(format) if format is not None else _detected(source)
    reader.check_options(options)
    trace = reader.open(source, options)
    if next(trace.rows(), None) is None:
        met = "; ".join(note for note in trace.notes if note not in trace.standing_notes) or "it has no rows"
        raise SpecError(
            f"{source.shown}: not a single usable row as {reader.name}: {met}; is it another format (--format)?"
        )
    trace.forget()
    return trace


def _one_of(flag: str, given: str | None, allowed: tuple[Word, ...]) -> Word | None:
    if given is None:
        return None
    for word in allowed:
        if word == given:
            return word
    raise SpecError(f"command line: {flag} {given!r} is not known; allowed: {', '.join(allowed)}")


def _chosen(name: str) -> Reader:
    if name not in READERS:
        close = difflib.get_close_matches(name, READERS, n=1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        raise SpecError(f"unknown trace format {name!r}{hint}; allowed: {', '.join(READERS)}")
    return READERS[name]


def _detected(source: Source) -> Reader:
    """The one reader that knows the first file, and every other file too."""
    heads = [(file, head_of(file)) for file in source.files]
    first, head = heads[0]
    found = [reader for reader in READERS.values() if reader.matches(head)]
    if len(found) != 1:
        told = (
            f"could be {' or '.join(r.name for r in found)}" if found else f"is no format that is known; {_shape(head)}"
        )
        raise SpecError(f"{first.shown}: {told}; say which with --format, one of {', '.join(READERS)}")
    strange = [file.shown for file, other in heads if not found[0].matches(other)]
    if strange:
        raise SpecError(f"{strange[0]}: is not {found[0].name} as {first.shown} is; a folder holds one format")
    return found[0]


def _shape(head: Head) -> str:
    noun = {"csv": "its header is", "parquet": "its columns are"}.get(head.kind, "its first entries have the keys")
    return f"{noun} {', '.join(sorted(head.keys)[:12]) or 'none'}"
