"""Endpoints files: strict, all problems at once, and the layout that follows."""

from __future__ import annotations

import pytest

from ppd_bench.core.errors import SpecError
from ppd_bench.core.topology import parse_topology
from ppd_bench.engine.endpoints import Endpoint, load_endpoints

GOOD = """
tensor_parallel_size: 2
engines:
  - {role: D, url: "http://10.0.0.2:8100", engine_id: decode-a}
  - {role: P, url: "http://10.0.0.1:8100/"}
  - {role: D, url: "http://[fd00::1]:8101"}
"""


def test_engines_become_the_workers_of_their_layout_in_its_order() -> None:
    found = load_endpoints(GOOD, file="e.yaml")
    assert found.layout == parse_topology("1P_2D@tp2")
    assert [(e.worker_id, e.url, e.engine_id) for e in found.endpoints] == [
        ("P0", "http://10.0.0.1:8100", None),
        ("D0", "http://10.0.0.2:8100", "decode-a"),
        ("D1", "http://[fd00::1]:8101", None),
    ]


def test_they_serve_every_topology_of_their_layout_and_no_other() -> None:
    found = load_endpoints(GOOD, file="e.yaml")
    assert found.serving(parse_topology("1P_1D_1pD@tp2")) == found.endpoints
    with pytest.raises(SpecError, match=r"'1P_1D@tp2' needs the layout 1P_1D@tp2, and these engines are 1P_2D@tp2"):
        found.serving(parse_topology("1P_1D@tp2"))


def test_all_problems_of_a_file_are_said_at_once() -> None:
    text = """
engines:
  - {role: P, url: "http://a:1"}
  - {role: P, url: "https://b:1"}
  - {role: P, url: "http://c"}
  - {role: P, url: "http://a:1"}
"""
    with pytest.raises(SpecError) as caught:
        load_endpoints(text, file="e.yaml")
    assert caught.value.problems == (
        "e.yaml: engines[1].url: is not an engine's address, got 'https://b:1'; allowed: http://HOST:PORT, without a path",
        "e.yaml: engines[2].url: is not an engine's address, got 'http://c'; allowed: http://HOST:PORT, without a path",
        "e.yaml: engines[3].url: is the address of engines[0] too; allowed: each engine once",
        "e.yaml: engines: topology '4P' lacks a decode node (D or pD): P and D only work together; "
        "allowed: R engines, or at least one P and one D",
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("engines: []", "e.yaml: engines: is empty; allowed: R engines, or at least one P and one D"),
        ("engine: []", "e.yaml: engine: unknown key 'engine', did you mean 'engines'?"),
        ("engines: [{role: pD, url: 'http://a:1'}]", "e.yaml: engines[0].role: must be 'R', 'P' or 'D', got 'pD'"),
        ("engines: [{role: R, url: 'http://a:99999'}]", "e.yaml: engines[0].url: is not an engine's address"),
        ("engines: [{role: R, url: 'http://a:1/v1'}]", "e.yaml: engines[0].url: is not an engine's address"),
        ("tensor_parallel_size: 0\nengines: []", "e.yaml: tensor_parallel_size: must be greater than or equal to 1"),
    ],
)
def test_what_cannot_be_used_is_named_by_its_place(text: str, problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_endpoints(text, file="e.yaml")
    assert any(line.startswith(problem) for line in caught.value.problems)


def test_an_endpoint_knows_its_address() -> None:
    found = load_endpoints(GOOD, file="e.yaml")
    assert isinstance(found.endpoints[0], Endpoint)
    assert (found.endpoints[2].host, found.endpoints[2].port) == ("fd00::1", 8101)
