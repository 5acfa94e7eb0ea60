"""How a table comes into force, and what a bad one changes: nothing."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

import orjson
import pytest
from router_tables import a_table

from ppd_bench.core.decision import Decision
from ppd_bench.core.enums import Route
from ppd_bench.core.errors import NoEvidence, TableError, WrongDomain
from ppd_bench.core.point import PlacementSpec, PolicySpec, content_hash
from ppd_bench.core.topology import parse_topology
from ppd_bench.policy.events import Finished, Sent
from ppd_bench.policy.ledger import Ledger
from ppd_bench.policy.query import RouteQuery
from ppd_bench.router.tables import PolicyBox
from ppd_bench.runner.tables import table_text

TOPOLOGY = parse_topology("2P_2D")


def box_on(path: Path, **more: object) -> PolicyBox:
    weights = {name: more.pop(name) for name in ("w_ttft", "w_tpot") if name in more}
    load = functools.partial(table_text, path, **weights)  # type: ignore[arg-type]
    return PolicyBox(TOPOLOGY, PolicySpec(decider="table"), PlacementSpec(), seed=0, load=load, **more)  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "table.json"
    file.write_text(a_table("local"))
    return file


def test_b33_a_missing_table_is_an_error_and_no_silent_pd(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"nowhere.json: cannot be read"):
        box_on(tmp_path / "nowhere.json")


def test_b29_a_table_of_an_earlier_minor_version_decides_under_the_hash_that_its_file_has(path: Path) -> None:
    content = orjson.loads(a_table("local"))
    content["schema_version"] = "1.0"
    del content["rules"]["min_repeats"], content["content_hash"]
    content["content_hash"] = content_hash(content)
    path.write_bytes(orjson.dumps(content))
    query = RouteQuery(
        request_id="r", session_id="s", turn=2, context_tokens=1024, input_tokens=64, max_output_tokens=64
    )
    ledger = Ledger(TOPOLOGY)
    ledger.observe(Sent(0.0, "q", "s", 1, 1024, 64, Decision(Route.PD, 0, 2, "turn-1")))
    ledger.observe(Finished(1.0, "q", True, 64, 1024))
    box = box_on(path)
    reason = box.now.policy.decide(query, ledger.view(2.0, "s")).reason
    assert (box.now.info["hash"], reason.split()[:2]) == (content["content_hash"], ["table", content["content_hash"]])


def test_b33_a_table_for_another_layout_model_or_gpu_is_refused(path: Path) -> None:
    path.write_text(a_table("local", layout="1P_3D"))
    with pytest.raises(WrongDomain, match="layout '1P_3D', not '2P_2D'"):
        box_on(path)
    path.write_text(a_table("local"))
    with pytest.raises(WrongDomain, match="model 'fake-model', not 'other'"):
        box_on(path, model="other")
    with pytest.raises(WrongDomain, match="gpu 'cpu', not 'h100'"):
        box_on(path, gpu="h100")


def test_b33_a_table_that_knows_too_little_is_refused_unless_that_is_allowed(path: Path) -> None:
    path.write_text(a_table("pd", evidence="insufficient"))
    with pytest.raises(NoEvidence, match="100%"):
        box_on(path)
    assert box_on(path, max_unknown_ratio=1.0).now.table is not None


def test_weights_given_at_the_start_decide_anew(path: Path) -> None:
    given = box_on(path)
    weighed = box_on(path, w_ttft=0.0, w_tpot=1.0)
    assert given.now.table is not None
    assert weighed.now.table is not None
    assert {cell.decision for cell in given.now.table.cells} == {"local"}
    assert {cell.decision for cell in weighed.now.table.cells} == {"pd"}
    assert (weighed.now.info["w_ttft"], weighed.now.info["w_tpot"]) == ("0", "1")


def test_a_new_table_is_taken_into_use_as_a_whole(path: Path) -> None:
    box = box_on(path)
    before = box.now
    path.write_text(a_table("pd"))
    assert asyncio.run(box.reload())
    assert box.now is not before
    assert (box.n_reloads, box.n_refusals, box.problem) == (1, 0, None)
    assert not asyncio.run(box.reload())  # the same file again is no news
    assert box.n_reloads == 1


@pytest.mark.parametrize("text", ["{", a_table("local", layout="1P_3D"), a_table("local", gpu="h100"), ""])
def test_a_bad_new_table_keeps_the_old_one_and_says_so(path: Path, text: str) -> None:
    box = box_on(path)
    before = box.now
    path.write_text(text)
    assert not asyncio.run(box.reload())
    assert box.now is before
    assert box.n_refusals == 1
    assert "stays" in str(box.problem)
    path.write_text(a_table("pd"))
    assert asyncio.run(box.reload())
    assert box.problem is None


def test_without_a_table_there_is_nothing_to_reload() -> None:
    box = PolicyBox(TOPOLOGY, PolicySpec(decider="always_pd"), PlacementSpec(), seed=0)
    assert not asyncio.run(box.reload())
    assert box.now.info == {}
