"""Which engines there are: files that change, heartbeats over real ZeroMQ sockets, and who takes which place (B21, B39)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd_bench.core.enums import Role
from ppd_bench.core.errors import LaunchError, SpecError
from ppd_bench.core.topology import parse_topology
from ppd_bench.policy.placements import Ask, session_affinity
from ppd_bench.policy.query import RouteQuery, RouterView, fleet_of
from ppd_bench.router.discovery import (
    MAX_HEARTBEAT_BYTES,
    MAX_MEMBERS,
    EndpointsFile,
    Heartbeat,
    HeartbeatListener,
    Member,
    Registry,
    place,
    read_heartbeat,
    send_heartbeats,
)

msgpack = pytest.importorskip("msgpack", reason="heartbeats need msgpack and pyzmq")
zmq = pytest.importorskip("zmq", reason="heartbeats need msgpack and pyzmq")

VLLM_BEAT = {"type": "P", "http_address": "10.0.0.1:8100", "zmq_address": "10.0.0.1:21001"}
"""What vLLM's P2P connector sends."""


async def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


# -- messages --------------------------------------------------------------------------------------------------------


def test_vllms_own_heartbeat_is_understood() -> None:
    beat = read_heartbeat(msgpack.packb(VLLM_BEAT))
    assert beat == Heartbeat(member=Member(role=Role.PREFILL, host="10.0.0.1", port=8100))


def test_so_are_the_keys_that_are_ours() -> None:
    content = {
        "type": "D",
        "http_address": "http://[fd00::1]:8100/",
        "engine_id": "d-a",
        "start_time": 17,
        "leaving": True,
    }
    beat = read_heartbeat(msgpack.packb(content))
    member = Member(role=Role.DECODE, host="fd00::1", port=8100, engine_id="d-a", start_s=17.0)
    assert beat == Heartbeat(member=member, leaving=True)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\xc1", "not msgpack"),
        (b"", "not msgpack"),
        (msgpack.packb(VLLM_BEAT)[:-3], "not msgpack"),
        (msgpack.packb([1, 2]), "not a map"),
        (msgpack.packb({**VLLM_BEAT, "type": "X"}), "no usable type and http_address"),
        (msgpack.packb({"type": "P"}), "no usable type and http_address"),
        (msgpack.packb({**VLLM_BEAT, "http_address": "https://a:1"}), "no usable type and http_address"),
        (msgpack.packb({**VLLM_BEAT, "http_address": "a:99999"}), "no usable type and http_address"),
        (msgpack.packb({**VLLM_BEAT, "http_address": "a:1/v1"}), "no usable type and http_address"),
        (msgpack.packb({**VLLM_BEAT, "http_address": "u@a:1"}), "no usable type and http_address"),
        (msgpack.packb({**VLLM_BEAT, "http_address": 7, 5: [None]}), "no usable type and http_address"),
    ],
)
def test_a_malformed_message_is_named_and_raises_nothing(data: bytes, problem: str) -> None:
    assert read_heartbeat(data) == problem


@given(st.binary(max_size=200))
def test_no_bytes_raise(data: bytes) -> None:
    assert isinstance(read_heartbeat(data), str | Heartbeat)


def test_a_token_keeps_strangers_out() -> None:
    assert read_heartbeat(msgpack.packb(VLLM_BEAT), token="s3cret") == "wrong token"
    assert read_heartbeat(msgpack.packb({**VLLM_BEAT, "token": "guess"}), token="s3cret") == "wrong token"
    assert isinstance(read_heartbeat(msgpack.packb({**VLLM_BEAT, "token": "s3cret"}), token="s3cret"), Heartbeat)


# -- who was heard of ------------------------------------------------------------------------------------------------


def member(port: int, role: Role = Role.DECODE, **more: Any) -> Member:
    return Member(role=role, host="10.0.0.1", port=port, **more)


def test_b39_an_engine_is_gone_after_its_silence_and_not_before() -> None:
    registry = Registry(silence_s=30.0)
    assert registry.heard(Heartbeat(member=member(1)), 0.0)
    assert not registry.heard(Heartbeat(member=member(1)), 10.0)
    assert not registry.expire(39.9)
    assert registry.silent_for_s(member(1).address, 39.0) == 29.0
    assert registry.expire(40.0)
    assert registry.members == ()


def test_an_engine_that_says_goodbye_is_gone_at_once_and_a_new_start_is_a_change() -> None:
    registry = Registry()
    registry.heard(Heartbeat(member=member(1, start_s=5.0)), 0.0)
    assert registry.heard(Heartbeat(member=member(1, start_s=6.0)), 1.0)
    assert registry.heard(Heartbeat(member=member(1), leaving=True), 2.0)
    assert registry.members == ()
    assert not registry.heard(Heartbeat(member=member(1), leaving=True), 3.0)


def test_a_flood_of_engines_fills_no_memory() -> None:
    registry = Registry()
    for port in range(1, 3 * MAX_MEMBERS):
        registry.heard(Heartbeat(member=member(port)), 0.0)
    assert len(registry.members) == MAX_MEMBERS


# -- sockets ---------------------------------------------------------------------------------------------------------


def test_heartbeats_arrive_over_zeromq_and_a_goodbye_when_the_sender_ends() -> None:
    async def main() -> None:
        listener, heard = HeartbeatListener(port=0), []
        listener.open()
        listening = asyncio.ensure_future(listener.run(heard.append))
        sending = asyncio.ensure_future(send_heartbeats((listener.host, listener.port), VLLM_BEAT, every_s=0.02))
        await until(lambda: len(heard) >= 3)
        sending.cancel()
        await until(lambda: heard[-1].leaving)
        listening.cancel()
        await asyncio.gather(sending, listening, return_exceptions=True)
        assert {beat.member.address for beat in heard} == {("10.0.0.1", 8100)}

    asyncio.run(main())


def test_malformed_and_oversized_messages_are_counted_and_the_next_good_one_is_heard() -> None:
    async def main() -> None:
        listener, heard = HeartbeatListener(port=0), []
        listener.open()
        listening = asyncio.ensure_future(listener.run(heard.append))
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(f"tcp://127.0.0.1:{listener.port}")
        for data in (b"rubbish", msgpack.packb({"type": "P"}), b""):
            socket.send(data)
        await until(lambda: listener.n_malformed == 3)
        socket.send(b"x" * (MAX_HEARTBEAT_BYTES + 1))  # drops the connection, which ZeroMQ makes anew
        await asyncio.sleep(0.3)
        socket.send(msgpack.packb(VLLM_BEAT))
        await until(lambda: heard)
        socket.close(linger=0)
        context.term()
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        assert (listener.n_malformed, listener.last_problem) == (3, "not msgpack")

    asyncio.run(main())


def test_an_engine_that_starts_anew_under_its_socket_name_is_heard() -> None:
    async def main() -> None:
        listener, heard = HeartbeatListener(port=0), []
        listener.open()
        listening = asyncio.ensure_future(listener.run(heard.append))
        context = zmq.Context()
        sockets = [context.socket(zmq.DEALER) for _ in range(2)]
        for start, socket in enumerate(sockets, 1):
            socket.setsockopt_string(zmq.IDENTITY, VLLM_BEAT["zmq_address"])
            socket.connect(f"tcp://127.0.0.1:{listener.port}")
            socket.send(msgpack.packb({**VLLM_BEAT, "start_time": start}))
            await until(lambda start=start: heard and heard[-1].member.start_s == start)
        for socket in sockets:
            socket.close(linger=0)
        context.term()
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)

    asyncio.run(main())


def test_a_port_that_is_taken_is_an_error_that_says_so() -> None:
    async def main() -> None:
        first = HeartbeatListener(port=0)
        first.open()
        with pytest.raises(LaunchError, match=rf"cannot be heard at 127\.0\.0\.1:{first.port} .* give another"):
            HeartbeatListener(port=first.port).open()
        first.close()

    asyncio.run(main())


# -- a file ----------------------------------------------------------------------------------------------------------

GOOD = "engines: [{role: P, url: 'http://a:1'}, {role: D, url: 'http://a:2'}]"


def test_a_file_is_read_again_only_when_it_changed_and_a_bad_one_keeps_the_old(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text(GOOD)
    file = EndpointsFile(path)
    assert file.read().layout == parse_topology("1P_1D")
    assert file.reread() is None
    path.write_text("engines: nonsense")
    assert file.reread() is None
    assert file.problem is not None
    assert str(path) in file.problem
    path.unlink()
    assert file.reread() is None
    assert file.problem is not None
    path.write_text(GOOD.replace("a:2", "b:22"))
    found = file.reread()
    assert found is not None
    assert (found.endpoints[1].url, file.problem) == ("http://b:22", None)


def test_a_file_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nowhere.yaml: cannot be read .* give an endpoints file"):
        EndpointsFile(tmp_path / "nowhere.yaml").read()


# -- places ----------------------------------------------------------------------------------------------------------

SLOTS = [("P0", Role.PREFILL), ("P1", Role.PREFILL), *((f"D{i}", Role.DECODE) for i in range(4))]


@given(st.permutations([member(p, r) for p, r in enumerate([Role.PREFILL] * 2 + [Role.DECODE] * 4, 1)]))
def test_b21_places_do_not_depend_on_the_order_in_which_engines_are_heard(members: list[Member]) -> None:
    placed = place(members, SLOTS, {})
    assert placed == place(sorted(members, key=lambda m: m.port), SLOTS, {})
    assert all(placed[slot].role is role for slot, role in SLOTS)


@given(st.sets(st.integers(1, 60), min_size=4, max_size=12), st.data())
def test_an_engine_keeps_its_place_whoever_comes_and_goes(ports: set[int], data: st.DataObject) -> None:
    before = place([member(port) for port in ports], SLOTS, {})
    held = {slot: m.address for slot, m in before.items()}
    left = data.draw(st.sets(st.sampled_from(sorted(ports)), max_size=3))
    new = data.draw(st.sets(st.integers(100, 120), max_size=4))
    after = place([member(port) for port in (ports - left) | new], SLOTS, held)
    for slot, m in before.items():
        assert after.get(slot) == m or m.port in left
    assert len({m.address for m in after.values()}) == len(after)


def test_b21_one_engine_less_at_a_restart_moves_few_of_the_others() -> None:
    slots = [(f"D{i}", Role.DECODE) for i in range(8)]
    moved = n = 0
    for base in range(100, 2100, 10):
        members = [member(base + i) for i in range(8)]
        whole = place(members, slots, {})
        fewer = place(members[:-1], slots, {})
        moved += sum(whole[slot] != m for slot, m in fewer.items() if whole[slot].port != members[-1].port)
        n += 7
    assert moved / n < 0.25  # shifting along a sorted list would move half of them


# -- conversations ---------------------------------------------------------------------------------------------------


def _ask(session_id: str, n: int, candidates: tuple[int, ...]) -> Ask:
    topology = parse_topology(f"1P_{n}D")
    zeros = (0,) * topology.n_workers
    view = RouterView(0.0, zeros, zeros, zeros, zeros, (None,) * topology.n_workers, 0.0, None)
    query = RouteQuery("r", session_id, 1, 0, 10, 10)
    return Ask(query, view, candidates, zeros, fleet_of(topology), 0, {})


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_b21_a_worker_that_leaves_moves_its_own_conversations_only_and_evenly(n: int) -> None:
    everybody = tuple(range(1, n + 1))
    sessions = [f"{i:024x}" for i in range(2000)]
    home = {s: session_affinity(_ask(s, n, everybody)) for s in sessions}
    shares = Counter(home.values())
    assert max(shares.values()) < 1.25 * len(sessions) / n
    for gone in everybody:
        left = tuple(w for w in everybody if w != gone)
        now = {s: session_affinity(_ask(s, n, left)) for s in sessions}
        moved = [s for s in sessions if now[s] != home[s]]
        assert {home[s] for s in moved} == {gone}
        assert len(moved) / len(sessions) <= 1.0 / n + 0.05


@given(st.text(min_size=1, max_size=30), st.permutations(range(1, 9)), st.integers(1, 8))
def test_b21_a_conversations_worker_does_not_depend_on_the_order_or_on_workers_that_are_not_its_own(
    session_id: str, order: list[int], n_there: int
) -> None:
    there = tuple(order[:n_there])
    chosen = session_affinity(_ask(session_id, 8, there))
    assert chosen == session_affinity(_ask(session_id, 8, tuple(sorted(there))))
    assert chosen == session_affinity(_ask(session_id, 8, (chosen, *[w for w in there[:2] if w != chosen])))
