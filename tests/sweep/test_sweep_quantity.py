"""Numbers with units."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd_bench.sweep.quantity import parse_bandwidth, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (10, 10.0),
        (0.25, 0.25),
        ("10", 10.0),
        ("10s", 10.0),
        (" 10 s ", 10.0),
        ("500ms", 0.5),
        ("7.5us", 7.5e-6),
        (".5min", 30.0),
        ("2h", 7200.0),
        ("1e3ms", 1.0),
        ("-3s", -3.0),
    ],
)
def test_durations_are_seconds(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "rate"),
    [(1.5e11, 1.5e11), ("150GB/s", 1.5e11), ("1GiB/s", 2.0**30), ("3 kB/s", 3000.0), ("2TB/s", 2e12), ("1e9", 1e9)],
)
def test_bandwidths_are_bytes_per_second(text: object, rate: float) -> None:
    assert parse_bandwidth(text) == rate


@pytest.mark.parametrize(
    ("text", "size"),
    [(7, 7), ("2GB", 2_000_000_000), ("2GiB", 2**31), ("1.5kB", 1500), ("3B", 3), (2e9, 2_000_000_000)],
)
def test_sizes_are_whole_bytes(text: object, size: int) -> None:
    assert parse_size(text) == size
    assert isinstance(parse_size(text), int)


@pytest.mark.parametrize("text", ["10 parsecs", "10S", "10sec", "10GB", "10 m s"])
def test_an_unknown_unit_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="has an unknown unit"):
        parse_duration(text)


@pytest.mark.parametrize(
    "value", ["", "s", "ten", "1,5s", "--1", "1 2", True, None, [], {}, math.nan, math.inf, "nan", "٣s"]
)
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="must be a duration, got"):
        parse_duration(value)


def test_a_part_of_a_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="not a whole number of bytes"):
        parse_size("1.0005kB")


@given(st.floats(0, 1e6))
def test_a_number_of_milliseconds_is_the_same_double_as_its_decimal(ms: float) -> None:
    assert parse_duration(f"{ms!r}ms") == pytest.approx(ms / 1000, rel=1e-15)
    assert parse_duration(ms) == ms
