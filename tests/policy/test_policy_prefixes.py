"""What a router believes of prefix caches: the longest prefix that a worker was sent, and placement by it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ppd_bench.core.decision import Decision
from ppd_bench.core.enums import Route
from ppd_bench.core.topology import parse_topology
from ppd_bench.policy.events import Sent, WorkerReset
from ppd_bench.policy.ledger import Ledger
from ppd_bench.policy.placements import hit_ratio
from ppd_bench.policy.prefixes import PrefixIndex
from ppd_bench.policy.query import RouteQuery

Prompts = list[tuple[list[int], int]]


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=6), st.integers(0, 2)), max_size=20),
    st.lists(st.integers(0, 2), max_size=6),
)
def test_the_longest_known_prefix_is_what_comparing_all_prompts_gives(sent: Prompts, asked: list[int]) -> None:
    known: dict[tuple[int, ...], int] = {}

    def chained(prompt: list[int]) -> list[int]:
        return [known.setdefault(tuple(prompt[: k + 1]), len(known)) for k in range(len(prompt))]

    index = PrefixIndex(3)
    for prompt, worker in sent:
        index.note(chained(prompt), worker)
    expected = [max((_common(prompt, asked) for prompt, to in sent if to == worker), default=0) for worker in range(3)]
    assert list(index.n_known(chained(asked))) == expected


def _common(one: list[int], two: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def test_a_worker_that_lost_its_cache_is_believed_to_hold_nothing() -> None:
    index = PrefixIndex(2)
    index.note([1, 2], 0)
    index.note([1, 2, 3], 1)
    index.forget(1)
    assert index.n_known([1, 2, 3]) == (2, 0)
    assert index.n_blocks == 2


def _query(name: str, ids: tuple[int, ...]) -> RouteQuery:
    return RouteQuery(name, name, 1, 0, 100, 10, ids, 16)


def test_the_ledger_learns_where_prompts_went_and_forgets_with_the_cache() -> None:
    ledger = Ledger(parse_topology("1P_2D"))
    ledger.observe(Sent(0.0, "a", "a", 1, 100, 10, Decision(Route.PD, 0, 2, "test"), (5, 6, 7)))
    view = ledger.view(1.0, "b", (5, 6, 9))
    assert view.prefix_blocks == (2, 0, 2)
    assert [hit_ratio(_query("b", (5, 6, 9)), view, worker) for worker in range(3)] == [0.32, 0.0, 0.32]
    ledger.observe(WorkerReset(2.0, 0))
    assert ledger.view(3.0, "b", (5, 6, 9)).prefix_blocks == (0, 0, 2)
    assert ledger.view(3.0, "b").prefix_blocks == ()
