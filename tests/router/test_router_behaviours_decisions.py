"""ROUTER.md B27 to B38: how a turn is decided, and what is told of it."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from router_cases import PROMPT, Rig, events_of, on, until
from router_tables import a_table

from ppd_bench.core.errors import SpecError, TableError
from ppd_bench.policy.events import Sent
from ppd_bench.policy.ledger import Ledger
from ppd_bench.policy.policy import make_policy
from ppd_bench.router.turn_record import STAGES
from ppd_bench.runner.router import RouterOptions, prepare_router

SLOW = {"prefill_s": 0.02, "step_s": 0.005}


async def two_turns(rig: Rig, session: str = "s", **more: Any) -> Any:
    await rig.complete(session=session)
    return await rig.complete([*PROMPT, *range(20)], session=session, **more)


def test_b27_the_rate_that_the_table_is_asked_with_is_conversations_per_second() -> None:
    async def check(rig: Rig) -> None:
        for session in range(30):
            await rig.complete(n_tokens=1, session=f"s{session}")
            await rig.complete([*PROMPT, 1], n_tokens=1, session=f"s{session}")  # follow-up turns do not count
        now_s = rig.state.now_s()
        rate = rig.state.ledger.view(now_s, "").session_rps
        first_s = min(entry.time_s for entry in rig.entries if isinstance(entry, Sent))
        assert rate == pytest.approx(30 / max(1.0, now_s - first_s), rel=0.01)
        assert (await rig.row(60))["qps"] == pytest.approx(rate, rel=0.2)

    on("1P_1D", check, prefill_s=0.0, step_s=0.0005)


def test_b28_a_d_under_kv_pressure_is_avoided_and_where_all_are_the_router_sheds() -> None:
    async def check(rig: Rig) -> None:
        _, d0, d1 = rig.engines
        d0.behaviour.kv_usage = 0.97
        await until(lambda: (rig.state.ledger.view(0.0, "").kv_usage_ratio[1] or 0.0) > 0.9, within_s=10.0)
        for session in range(8):
            await rig.complete(n_tokens=1, session=f"s{session}")
        assert (d0.counts.n_requests, d1.counts.n_requests) == (0, 8)
        d1.behaviour.n_waiting_capacity = 2
        await until(lambda: rig.state.ledger.view(0.0, "").n_waiting_capacity[2] == 2, within_s=10.0)
        answer = await rig.complete(session="last")
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
        assert "KV memory" in answer.json()["error"]["message"]
        assert (await rig.row(9))["failure"] == "shed"
        assert rig.metric("events_total", event="shed") == 1.0

    on("1P_2D", check, max_kv_usage_ratio=0.9, settings={"shed": True})


def test_b29_every_decision_of_the_table_names_its_cell_its_evidence_and_the_table(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(a_table("local"))

    async def check(rig: Rig) -> None:
        info = rig.state.policies.now.info
        await two_turns(rig)
        row = await rig.row(2)
        assert (row["table_hash"], row["evidence"], row["rule"]) == (info["hash"], "measured", "equation1")
        assert row["cell"].startswith("small/")
        assert (info["w_ttft"], info["w_tpot"]) == ("1", "3")
        assert (await rig.http.get("/status")).json()["table"]["hash"] == info["hash"]
        assert rig.metric("table_decisions_total", evidence="measured") == 1.0

    on("2P_2D", check, table=path)


@pytest.mark.parametrize("decision", ["local", "pd"])
def test_b29_the_table_is_obeyed(tmp_path: Path, decision: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(a_table(decision))

    async def check(rig: Rig) -> None:
        await two_turns(rig)
        assert (await rig.row(2))["route"] == decision
        fleet = {"local": "local_cache_hit", "pd": "external_kv_transfer"}[decision]
        assert sum(engine.counts.sources[fleet] for engine in rig.engines) > 0

    on("2P_2D", check, table=path)


def test_a_new_table_file_is_taken_into_use_and_conversations_survive_it(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(a_table("local"))

    async def check(rig: Rig) -> None:
        await two_turns(rig)
        path.write_text("{")
        await until(lambda: rig.state.policies.problem is not None, within_s=5.0)
        assert any("stays" in line for line in rig.told)
        assert (await rig.http.get("/status")).json()["table"]["problem"] is not None
        await rig.complete([*PROMPT, *range(21)], session="s")
        replacement = tmp_path / "new"
        replacement.write_text(a_table("pd"))
        replacement.replace(path)
        await until(lambda: rig.state.policies.n_reloads == 1, within_s=5.0)
        await rig.running.reload()
        assert rig.told[-1].endswith("stays in use: its file says the same")
        await rig.complete([*PROMPT, *range(22)], session="s")
        rows = [await rig.row(n) for n in (1, 2, 3, 4)]
        assert [row["route"] for row in rows] == ["pd", "local", "local", "pd"]
        assert [row["turn"] for row in rows] == [1, 2, 3, 4]
        assert rows[3]["reason"].startswith("table ")
        assert rows[3]["table_hash"] != rows[2]["table_hash"]

    on("2P_2D", check, table=path)


def test_a_simulated_table_is_announced_as_such(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(a_table("local", executor="simulated", evidence="simulated"))

    async def check(rig: Rig) -> None:
        assert any("simulated, not measured" in line for line in rig.told)
        assert (await rig.http.get("/status")).json()["table"]["evidence"] == "simulated"

    on("2P_2D", check, table=path)


OPTIONS = {"topology": "2P_2D", "endpoints": Path("endpoints.yaml")}


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"table": Path("nowhere.json")}, TableError, "nowhere.json: cannot be read"),
        ({"topology": "2P2D"}, SpecError, "not understood"),
        ({"decider": "magic"}, SpecError, "--policy 'magic' is not known"),
        ({"decider": "table"}, SpecError, "--policy table needs --table FILE"),
        ({"decider": "always_pd", "x": 0.5}, SpecError, "--x is of no use"),
        ({"w_ttft": 2.0}, SpecError, "--w-ttft and --w-tpot weigh a table"),
        ({"placement": "magic"}, SpecError, "--placement 'magic' is not known"),
        ({"x": 2.0}, SpecError, "allowed: 0 to 1"),
        ({"max_kv_usage_ratio": 7.0}, SpecError, "above 0, up to 1"),
        ({"connector": "Magic"}, Exception, "no KV hand-off is known"),
        ({"certificate": Path("nowhere.pem")}, SpecError, "cannot be used"),
    ],
)
def test_b33_what_cannot_work_is_refused_before_anything_listens(more: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        prepare_router(RouterOptions(**{**OPTIONS, **more}))


@pytest.mark.parametrize(
    ("options", "routes"),
    [
        ({"decider": "always_pd"}, {"pd"}),
        ({"decider": "always_local"}, {"local"}),
        ({"x": 0.5}, {"pd", "local"}),
        ({"max_uncached_tokens": 10}, {"pd"}),
        ({"max_uncached_tokens": 100}, {"local"}),
        ({"placement": "cache_aware", "sticky": False, "decider": "always_local"}, {"local"}),
        ({"placement": "session_affinity", "decider": "always_local"}, {"local"}),
        ({"placement": "round_robin", "decider": "always_pd"}, {"pd"}),
    ],
)
def test_b34_every_policy_is_selectable_on_the_same_path(options: dict[str, Any], routes: set[str]) -> None:
    async def check(rig: Rig) -> None:
        for session in range(16):
            assert (await two_turns(rig, f"s{session}")).status_code == 200
        rows = [await rig.row(n) for n in range(1, 33)]
        assert {row["route"] for row in rows if row["turn"] == 2} == routes
        assert {row["route"] for row in rows if row["turn"] == 1} == {"pd"}

    on("2P_2D", check, prefill_s=0.0, step_s=0.0005, **options)


def test_b34_a_fraction_of_a_half_is_about_a_half() -> None:
    async def check(rig: Rig) -> None:
        await asyncio.gather(*(two_turns(rig, f"s{session}") for session in range(100)))
        local = [decision for decision in rig.decisions if decision.reason.startswith("fraction-local")]
        assert 25 <= len(local) <= 75

    on("2P_2D", check, prefill_s=0.0, step_s=0.0005, x=0.5)


def test_i7_the_log_replayed_through_a_fresh_ledger_and_policy_gives_the_routers_decisions(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(a_table("local"))

    async def check(rig: Rig) -> None:
        rig.engines[0].behaviour.status = 500  # fallbacks on the way
        asks = [two_turns(rig, f"s{session % 20}", stream=session % 2 == 0) for session in range(40)]
        await asyncio.gather(*asks)
        box = rig.state.policies
        fresh = make_policy(rig.state.topology, box._spec, box._placement, box._seed)
        policy = box.now.policy
        assert fresh.fleet == policy.fleet if box.now.table is None else True
        ledger = Ledger(rig.state.topology)
        n_decisions = 0
        for entry in rig.entries:
            if type(entry) is tuple:
                query, now_s, decision = entry
                assert policy.decide(query, ledger.view(now_s, query.session_id)) == decision
                n_decisions += 1
            else:
                ledger.observe(entry)  # type: ignore[arg-type]
        assert n_decisions == 80

    on("2P_2D", check, decider="fraction", x=0.5)


def test_b35_the_stages_of_every_turn_add_up_to_what_the_client_waited() -> None:
    async def check(rig: Rig) -> None:
        for stream in (False, True):
            for session in ("a", "b"):
                await two_turns(rig, session + str(stream), stream=stream)
        rows = [await rig.row(n) for n in range(1, 9)]
        names = ["t_recv_s", "t_decided_s", "t_p_sent_s", "t_p_done_s", "t_d_sent_s", "t_first_byte_s", "t_done_s"]
        for row in rows:
            instants = [row[name] for name in names if row.get(name) is not None]
            assert instants == sorted(instants)
            stages = [b - a for a, b in pairwise(instants)]
            assert sum(stages) == pytest.approx(row["t_done_s"] - row["t_recv_s"], abs=1e-3)
            assert len(instants) == (7 if row["route"] == "pd" else 5)
        assert all(name in row for row in rows for name in ("time_unix_s", "identity", "answer_bytes", "request_bytes"))

    on("1P_1D", check, decider="always_local", **SLOW)


def test_b35_what_the_router_counts_is_what_a_client_saw() -> None:
    """End to end at the client is the log's, and a little more for the sockets on the way."""

    async def check(rig: Rig) -> None:
        await rig.complete()
        began_s = perf_counter()
        await rig.complete(n_tokens=20, stream=True)
        waited_s = perf_counter() - began_s
        row = await rig.row(2)
        whole_s = row["t_done_s"] - row["t_recv_s"]
        assert whole_s <= waited_s
        assert whole_s >= waited_s - 0.05
        assert row["t_p_done_s"] - row["t_p_sent_s"] >= 0.02  # P's prefill
        assert row["t_done_s"] - row["t_first_byte_s"] >= 0.08  # 19 steps of 5 ms

    on("1P_1D", check, **SLOW)


def test_b36_headers_explain_where_that_is_wanted_and_metrics_count_by_reason() -> None:
    async def check(rig: Rig) -> None:
        answers = [await rig.complete(session="s"), await two_turns(rig, "s", stream=True)]
        headers = answers[1].headers
        assert (headers["x-ppd-route"], headers["x-ppd-decode-worker"]) == ("local", "D0")
        assert (headers["x-ppd-reason"], headers["x-ppd-turn"]) == ("always-local", "2")
        assert rig.metric("decisions_total", route="local", reason="always-local") >= 1.0
        assert rig.metric("decisions_total", route="pd", reason="turn-1") == 2.0
        text = (await rig.http.get("/metrics")).text
        for stage in STAGES:
            assert f'ppd_router_stage_seconds_count{{stage="{stage}"}}' in text
        assert rig.metric("overhead_seconds_count") >= 2.0
        assert rig.metric("worker_available", worker="D0") == 1.0
        assert rig.metric("requests_total", path="/v1/completions", status="200") == 3.0

    on("1P_1D", check, decider="always_local", settings={"explain": True})


def test_b36_without_the_option_headers_say_nothing_of_engines() -> None:
    async def check(rig: Rig) -> None:
        answer = await rig.complete()
        assert not [name for name in answer.headers if name.startswith("x-ppd")]

    on("1P_1D", check)


def test_b38_an_answer_counts_only_with_its_end_its_tokens_and_no_error() -> None:
    async def check(rig: Rig) -> None:
        d = rig.engines[1]
        whole = events_of(await rig.complete(stream=True))
        assert whole[-1] == "[DONE]"
        for script in ({"cut_after": 2}, {"error_after": 2}, {"die_after": 2}):
            for name, value in script.items():
                setattr(d.behaviour, name, value)
            broken = events_of(await rig.complete(stream=True))
            assert [event for event in broken if event != "[DONE]" and "error" in event]
            for name in script:
                setattr(d.behaviour, name, None)
        assert rig.metric("turns_total", outcome="ok") == 1.0
        assert [(await rig.row(n))["status"] for n in (1, 2, 3, 4)] == ["ok", "error", "error", "error"]

    on("1P_1D", check)
