"""Tables on narrow terminals: whole words, every column, and rows that can be told apart."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ppd_bench.cli.show import print_rows
from ppd_bench.cli.show_fit import fitted

WORDS = st.text(alphabet="abc_/", min_size=1, max_size=9)
TEXTS = st.lists(WORDS, max_size=4).map(" ".join)
TABLES = st.integers(1, 8).flatmap(
    lambda n: st.lists(st.lists(TEXTS, min_size=n, max_size=n), min_size=1, max_size=4)
)  # the first row is the head


def printed(columns: list[str], rows: list[list[str]], width: int) -> str:
    out = io.StringIO()
    print_rows(Console(file=out, width=width), "title", columns, rows)
    return out.getvalue()


@given(TABLES, st.integers(40, 120))
def test_no_table_is_wider_than_the_terminal_and_none_breaks_a_word(table: list[list[str]], room: int) -> None:
    head, *rows = table
    for block in fitted(head, rows, room):
        assert 1 + sum(width + 3 for _, width in block) <= room
        for index, width in block:
            assert all(len(word) <= width for row in table for word in row[index].split())


@given(TABLES, st.integers(40, 120))
def test_every_column_is_there_once_and_the_first_leads_every_table(table: list[list[str]], room: int) -> None:
    head, *rows = table
    blocks = [[index for index, _ in block] for block in fitted(head, rows, room)]
    assert {block[0] for block in blocks} == {0}
    assert [index for block in blocks for index in block[1:]] == list(range(1, len(head)))


@given(TABLES)
def test_where_there_is_room_nothing_wraps_and_there_is_one_table(table: list[list[str]]) -> None:
    head, *rows = table
    (block,) = fitted(head, rows, 1000)
    assert [width for _, width in block] == [max(len(row[index]) for row in table) for index in range(len(head))]


def test_a_word_that_alone_takes_the_terminal_is_broken_and_no_column_is_lost() -> None:
    text = printed(["what", "path"], [["a", "x" * 100], ["b", "y"]], 40)
    assert text.count("x") == 100
    assert max(map(len, text.splitlines())) <= 40


@pytest.mark.parametrize("width", [60, 80, 160])
def test_cells_of_a_wide_table_stay_legible(width: int) -> None:
    columns = ["cell", *(f"column{n}" for n in range(9))]
    rows = [[f"large/very_long_gen/{q}", *(f"{q}.{n:03d}" for n in range(9))] for q in (1, 2)]
    text = printed(columns, rows, width)
    assert all(word in text for row in [columns, *rows] for word in row)
    assert ("(continued)" in text) is (width < 160)


@pytest.mark.parametrize(
    "number", ["12", "+0.5", "-3", "1,024", "1.960e+15", "0.03 s", "93.5 %", "5, 100", "+0.6 ±0.1", "–", "7%"]
)
def test_numbers_stand_at_the_right_and_names_that_begin_with_a_digit_at_the_left(number: str) -> None:
    lines = printed(["name", "a long head of numbers"], [["4R", number], ["1P_3D", number]], 80).splitlines()
    assert f"│ 4R    │ {number:>22} │" in lines
