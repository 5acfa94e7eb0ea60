"""A trace that is open: its format, its rows as a stream, and what reading them met."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ppd_bench.core.trace import RowCounts, TraceFormat, TraceRow


@dataclass(slots=True)
class Pass:
    """What one reading of a source has met: rows kept and dropped by reason, and remarks, each with its first place."""

    counts: RowCounts = field(default_factory=RowCounts)
    remarks: dict[str, int] = field(default_factory=dict)
    first_places: dict[str, str] = field(default_factory=dict)

    def keep(self) -> None:
        self.counts.n_read += 1
        self.counts.n_kept += 1

    def drop(self, reason: str, place: str) -> None:
        """One row that is read and not given, for a reason that is the same text for the same kind of row."""
        self.counts.n_read += 1
        self.counts.drop(reason)
        self.first_places.setdefault(f"dropped: {reason}", place)

    def remark(self, what: str, place: str) -> None:
        """Something about a row that is kept."""
        self.remarks[what] = self.remarks.get(what, 0) + 1
        self.first_places.setdefault(what, place)

    def notes(self) -> list[str]:
        """One line per reason and remark: how often, and where first."""
        met = {f"dropped: {reason}": n for reason, n in self.counts.dropped.items()} | self.remarks
        return [f"{n:,} x {what} (first at {self.first_places[what]})" for what, n in met.items()]


ReadRows = Callable[[Pass], Iterator[TraceRow]]


@dataclass(slots=True, kw_only=True)
class Trace:
    """Recorded traffic that can be streamed, again and again.

    ``counts`` and ``notes`` belong to the latest pass and are complete when it has ended; ``notes`` begin with what holds for the
    source as a whole (where token counts come from, what the format leaves out).
    """

    source: str
    format: TraceFormat
    read: ReadRows
    standing_notes: tuple[str, ...] = ()
    counts: RowCounts = field(default_factory=RowCounts)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """As before any pass."""
        self.counts = RowCounts()
        self.notes = list(self.standing_notes)

    def rows(self) -> Iterator[TraceRow]:
        """The rows in file order; every call reads the source anew.

        Raises:
            SpecError: the source breaks off in a way that nothing after it can be read, or holds none of what its format
            promises.
        """
        met = Pass()
        self.counts = met.counts
        self.notes = list(self.standing_notes)
        yield from self.read(met)
        self.notes = [*self.standing_notes, *met.notes()]
