"""Workload files: what they mean, and that everything wrong with one is said at once."""

from __future__ import annotations

import pytest

from ppd_bench.core.errors import SpecError
from ppd_bench.core.workload import TurnLengths
from ppd_bench.workload.spec import DEFAULT_MAX_OUTPUT_TOKENS, load_workload

GOOD = """
name: chat
category: balanced
turns:
  - {input_tokens: 10, output_tokens: 20}
  - {input_tokens: 3, output_tokens: 4}
"""


def problems(text: str) -> tuple[str, ...]:
    with pytest.raises(SpecError) as caught:
        load_workload(text, file="w.yaml")
    assert caught.value.exit_code == 2
    return caught.value.problems


def test_a_good_file_becomes_the_workload_it_describes() -> None:
    workload = load_workload(GOOD, file="w.yaml")
    assert (workload.name, workload.category) == ("chat", "balanced")
    assert workload.turns[1] == TurnLengths(input_tokens=3, output_tokens=4)
    assert workload.context_tokens(2) == 30
    assert workload.max_output_tokens == DEFAULT_MAX_OUTPUT_TOKENS == 2048


def test_a_description_is_allowed_and_changes_nothing() -> None:
    assert load_workload(GOOD + "description: words\n", file="w") == load_workload(GOOD, file="w")


def test_all_problems_of_a_file_come_at_once_each_with_place_and_what_is_allowed() -> None:
    found = problems(
        """
name: two words
name: again?
categry: balanced
category: lopsided
max_output_tokens: true
turns:
  - {input_tokens: 1.0, output_tokens: 0}
  - {input_tokens: "5"}
  - 7
1: x
"""
    )
    assert [line.split(": ")[1] for line in found] == [
        "name",
        "1",
        "name",
        "category",
        "max_output_tokens",
        "turns[0].input_tokens",
        "turns[0].output_tokens",
        "turns[1].input_tokens",
        "turns[1].output_tokens",
        "turns[2]",
        "categry",
    ]
    assert all(line.startswith("w.yaml: ") and "; allowed: " in line for line in found)
    assert found[0] == "w.yaml: name: written twice (lines 2 and 3); allowed: each key once"
    assert "did you mean 'category'?" in found[-1]


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("", "(whole file)", "is an empty file"),
        ("# only a comment", "(whole file)", "is an empty file"),
        ("- 1", "(whole file)", "is a list"),
        ("word", "(whole file)", "is a str"),
        ("name: [", "line 1, column 8", "not valid YAML"),
        ("name: a\n\tturns: 1", "line 2, column 1", "not valid YAML"),
        ("a: 1\n---\nb: 2", "line 2, column 1", "another document"),
        ("a: !!python/object/apply:os.getcwd []", "line 1, column 4", "could not determine a constructor"),
        ("a: *nowhere", "line 1, column 4", "undefined alias"),
        ("? [a]\n: b", "line 1, column 3", "unhashable key"),
        ("a: 2024-13-45", "(whole file)", "month must be in 1..12"),
        ("\x00", "(whole file)", "not valid YAML"),
        ("[" * 600, "(whole file)", "nested too deeply"),
    ],
)
def test_text_that_is_no_mapping_is_refused_with_its_place(text: str, where: str, what: str) -> None:
    (line,) = problems(text)
    assert line.startswith(f"w.yaml: {where}: ")
    assert what in line


def test_keys_written_twice_are_found_at_every_depth() -> None:
    found = problems(GOOD.replace("{input_tokens: 10,", "{input_tokens: 9, input_tokens: 10,"))
    assert found == ("w.yaml: turns[0].input_tokens: written twice (lines 5 and 5); allowed: each key once",)


def test_an_output_longer_than_what_clients_declare_is_refused() -> None:
    (line,) = problems(GOOD + "max_output_tokens: 19\n")
    assert line.startswith("w.yaml: turns[0].output_tokens: 20 is more than max_output_tokens (19)")
    assert load_workload(GOOD + "max_output_tokens: 20\n", file="w").max_output_tokens == 20


def test_a_workload_without_turns_is_refused() -> None:
    (line,) = problems("name: a\ncategory: balanced\nturns: []\n")
    assert line.startswith("w.yaml: turns: is empty; allowed: ")


def test_a_file_that_contains_itself_is_refused_without_hanging() -> None:
    found = problems("name: a\ncategory: balanced\nturns: &t [*t]\n")
    assert found[0].startswith("w.yaml: turns[0]: ")
