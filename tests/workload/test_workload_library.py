"""Look-up by name and path, and the paper's workloads."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppd_bench.core.errors import SpecError
from ppd_bench.workload.library import PAPER_WORKLOADS, find_workload, list_workloads

OWN = "name: {name}\ncategory: balanced\nturns: [{{input_tokens: 1, output_tokens: 2}}]\n"

TURN1 = {"small": (128, 128), "large": (1024, 1024)}
TURN2 = {
    "tiny": (16, 32, "decode_heavy"),
    "short_gen": (32, 256, "decode_heavy"),
    "long_gen": (32, 512, "decode_heavy"),
    "very_long_gen": (64, 1024, "decode_heavy"),
    "small_bal": (64, 64, "balanced"),
    "mid_bal": (128, 128, "balanced"),
    "mid_paste": (256, 64, "prefill_heavy"),
    "big_paste": (512, 64, "prefill_heavy"),
    "huge_paste": (1024, 32, "prefill_heavy"),
}


CPU_WORKLOADS = ("cpu_chat", "cpu_paste")
"""Those of sweeps/cpu.yaml, for engines on a CPU."""

FIGURE_WORKLOADS = ("chat_16_turns", "chat_2_turns", "chat_4_turns", "chat_8_turns", "long_context_5_turns")
"""Those of sweeps/figure1.yaml and sweeps/figure10.yaml."""

OTHER_WORKLOADS = tuple(sorted((*CPU_WORKLOADS, *FIGURE_WORKLOADS)))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder that is no checkout."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_papers_eighteen_have_the_papers_lengths_and_categories(elsewhere: Path) -> None:
    found = {w.name: w for w in list_workloads()}
    assert tuple(found)[:18] == PAPER_WORKLOADS
    assert set(found) - set(PAPER_WORKLOADS) == set(OTHER_WORKLOADS)
    for first, lengths1 in TURN1.items():
        for second, (input_tokens, output_tokens, category) in TURN2.items():
            workload = found[f"{first}_{second}"]
            lengths = [(t.input_tokens, t.output_tokens) for t in workload.turns]
            assert lengths == [lengths1, (input_tokens, output_tokens)]
            assert workload.category == category
            assert workload.max_output_tokens == 2048


def test_every_bundled_workload_says_in_one_line_what_it_is() -> None:
    folder = Path(__file__).parents[2] / "workloads"
    texts = [file.read_text() for file in folder.glob("*.yaml")]
    assert all("\ndescription: " in text for text in texts)
    assert len({text.split("description: ")[1].splitlines()[0] for text in texts}) == 18 + len(OTHER_WORKLOADS)


def test_the_current_folders_copy_wins_over_the_bundled_one(elsewhere: Path) -> None:
    assert len(find_workload("small_tiny").turns) == 2
    (elsewhere / "workloads").mkdir()
    (elsewhere / "workloads" / "small_tiny.yaml").write_text(OWN.format(name="small_tiny"))
    assert len(find_workload("small_tiny").turns) == 1


def test_own_workloads_are_listed_after_the_papers(elsewhere: Path) -> None:
    (elsewhere / "workloads").mkdir()
    (elsewhere / "workloads" / "mine.yaml").write_text(OWN.format(name="mine"))
    assert tuple(w.name for w in list_workloads()) == (*PAPER_WORKLOADS, *OTHER_WORKLOADS, "mine")


@pytest.mark.parametrize("given", ["sub/mine.yaml", "sub/mine.yml", "./sub/mine.yaml"])
def test_a_path_is_read_as_it_is(elsewhere: Path, given: str) -> None:
    (elsewhere / "sub").mkdir()
    (elsewhere / given).write_text(OWN.format(name="mine"))
    assert find_workload(given).name == "mine"


def test_a_name_that_is_not_the_files_name_is_refused(elsewhere: Path) -> None:
    (elsewhere / "mine.yaml").write_text(OWN.format(name="yours"))
    with pytest.raises(SpecError, match=r"^mine\.yaml: name: 'yours' is not the file's name; allowed: mine$"):
        find_workload("mine.yaml")


def test_an_unknown_name_gets_the_closest_one_and_all_names(elsewhere: Path) -> None:
    with pytest.raises(SpecError) as caught:
        find_workload("smal_tiny")
    message = str(caught.value)
    assert message.startswith("unknown workload 'smal_tiny', did you mean 'small_tiny'?; allowed: ")
    assert all(name in message for name in PAPER_WORKLOADS)


def test_files_that_cannot_be_read_are_refused_in_words(elsewhere: Path) -> None:
    (elsewhere / "folder.yaml").mkdir()
    (elsewhere / "latin.yaml").write_bytes(b"name: caf\xe9")
    for given, what in [
        ("none.yaml", "no such workload file"),
        ("folder.yaml", "cannot be read"),
        ("latin.yaml", "is not UTF-8 text"),
    ]:
        with pytest.raises(SpecError, match=f"^{given}: {what}"):
            find_workload(given)
