"""How numbers are shown."""

from __future__ import annotations

import math

import pytest

from ppd_bench.report.units import UNKNOWN, listed, ms, number, percent, share, tokens_per_s


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0341, "34.1 ms"), (0.0074, "7.4 ms"), (12.3456, "12,346 ms"), (0.0, "0 ms"), (0.9996, "1,000 ms")],
)
def test_times_are_milliseconds_with_three_digits(value: float, text: str) -> None:
    assert ms(value).replace("\u00a0", " ") == text


@pytest.mark.parametrize("show", [ms, number, percent, tokens_per_s])
@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_what_is_not_known_is_a_dash_and_never_zero(show: object, value: float | None) -> None:
    assert callable(show)
    assert show(value) == UNKNOWN


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (0.922, "92 %"),
        (0.045, "4.5 %"),
        (0.0, "0 %"),
        (-0.0001, "0 %"),
        (0.05, "5 %"),
        (-0.153, "-15 %"),
        (4.4, "440 %"),
    ],
)
def test_ratios_are_per_cent(ratio: float, text: str) -> None:
    assert percent(ratio).replace("\u00a0", " ") == text


def test_shares_name_their_whole() -> None:
    assert share(114, 180, "cells").replace("\u00a0", " ") == "114 of 180 cells (63 %)"
    assert share(0, 0, "cells") == "0 of 0 cells"


def test_long_lists_say_how_much_they_leave_out() -> None:
    assert listed([]) == ""
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert listed(["a", "b", "c", "d"], most=2) == "a, b and 2 more"
