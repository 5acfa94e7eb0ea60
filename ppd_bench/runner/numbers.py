"""Numbers as the command line gives them: lists and durations, with errors that name the flag."""

from __future__ import annotations

from ppd_bench.core.errors import SpecError
from ppd_bench.sweep.quantity import parse_duration


def numbers(text: str, flag: str) -> tuple[float, ...]:
    """Comma-separated numbers.

    Raises:
        SpecError: every part that is none.
    """
    found: list[float] = []
    problems: list[str] = []
    for part in text.split(","):
        try:
            found.append(float(part))
        except ValueError:
            problems.append(f"command line: {flag}: {part.strip()!r} is no number")
    if problems:
        raise SpecError(problems)
    return tuple(found)


def whole_numbers(text: str, flag: str) -> tuple[int, ...]:
    """Comma-separated whole numbers; raises SpecError as ``numbers``."""
    found = numbers(text, flag)
    problems = [f"command line: {flag}: {n:g} is no whole number" for n in found if not n.is_integer()]
    if problems:
        raise SpecError(problems)
    return tuple(int(n) for n in found)


def seconds_of(text: str | None, flag: str) -> float | None:
    """Seconds of ``10min``; null where nothing was given.

    Raises:
        SpecError: it is no duration.
    """
    try:
        return None if text is None else parse_duration(text)
    except ValueError as error:
        raise SpecError(f"command line: {flag}: {error}; allowed: a duration such as 30s, 10min or 2h") from error
