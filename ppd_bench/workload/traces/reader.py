"""What a reader is: a format's name, how its files are told apart, and how one is opened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ppd_bench.core.errors import SpecError
from ppd_bench.workload.traces.source import Head, Source
from ppd_bench.workload.traces.trace import Trace

Unit = Literal["s", "ms", "us"]
Tail = Literal["ceil", "floor"]
UNITS: tuple[Unit, ...] = ("s", "ms", "us")
TAILS: tuple[Tail, ...] = ("ceil", "floor")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What the caller states about a trace; null leaves it to the format.

    ``tokenizer``: a tokenizer.json or a folder with one, for formats of text. ``block_tokens``: the block size of recorded
    ids, or the one in which text is to be hashed. ``time_unit``, ``tail``: of recorded times and ids.
    """

    tokenizer: Path | None = None
    block_tokens: int | None = None
    time_unit: Unit | None = None
    tail: Tail | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One format. ``takes``: the options that mean something to it; ``open`` checks what the format declares against the data."""

    name: str
    describes: str
    takes: frozenset[str]
    matches: Callable[[Head], bool]
    open: Callable[[Source, ReadOptions], Trace]

    def check_options(self, options: ReadOptions) -> None:
        """
        Raises:
            SpecError: an option that says nothing about this format, or a block size below 1.
        """
        given = [name for name in ReadOptions.__dataclass_fields__ if getattr(options, name) is not None]
        problems = [
            f"--{name.replace('_', '-')} means nothing for the format {self.name}; leave it out"
            for name in given
            if name not in self.takes
        ]
        if options.block_tokens is not None and options.block_tokens < 1:
            problems.append(f"--block-tokens {options.block_tokens}: a block has at least 1 token")
        if problems:
            raise SpecError(problems)


TEXT_OPTIONS = frozenset({"tokenizer", "block_tokens"})
HASH_OPTIONS = frozenset({"block_tokens", "time_unit", "tail"})
