"""ROUTER.md B18 to B26: whose turn it is, where its KV lies, and how long it is."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from time import perf_counter
from typing import Any

import orjson
import pytest
from fake_text import prompts_of
from router_cases import PROMPT, Rig, on, routing, run, text_of, until, user

LOCAL = {"decider": "always_local"}


async def say(rig: Rig, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The assistant's message after these."""
    answer = await rig.chat(messages, **more)
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


def sessions(rig: Rig) -> list[str]:
    """The conversation of every decided turn."""
    return [entry.session_id for entry in rig.entries if type(entry).__name__ == "Sent"]


def reasons(rig: Rig) -> list[str]:
    return [decision.reason for decision in rig.decisions]


def test_b18_a_chat_is_recognised_by_its_history_without_any_id() -> None:
    async def check(rig: Rig) -> None:
        messages = [user("tell me a story")]
        for turn in range(4):
            messages += [await say(rig, messages, stream=False), user(f"and then? {turn}")]
        assert len(set(sessions(rig))) == 1
        assert reasons(rig) == ["turn-1", *["always-local"] * 3]
        assert (await rig.row(2))["identity"] == "chain"

    on("1P_2D", check, **LOCAL)


def test_b18_two_users_who_say_hi_are_two_conversations() -> None:
    async def check(rig: Rig) -> None:
        first = [await say(rig, [user("hi")]), await say(rig, [user("hi")])]
        assert len(set(sessions(rig))) == 2
        assert first[0] == first[1]
        await say(rig, [user("hi"), first[0], user("I am Ann")])
        await say(rig, [user("hi"), first[1], user("I am Bob")])
        assert len(set(sessions(rig))) == 2  # each went on with one of them

    on("1P_2D", check, **LOCAL)


def test_b18_a_fork_an_edit_and_another_system_prompt_are_conversations_of_their_own() -> None:
    async def check(rig: Rig) -> None:
        opening = [{"role": "system", "content": "be kind"}, user("one")]
        opening.append(await say(rig, opening))
        await say(rig, [*opening, user("two")])
        known = set(sessions(rig))
        await say(rig, [*opening, user("two, differently")])  # forked
        await say(rig, [*opening[:1], user("one!"), *opening[2:], user("two")])  # edited
        await say(rig, [{"role": "system", "content": "be rude"}, *opening[1:], user("two")])
        assert len(set(sessions(rig)) - known) == 3
        assert reasons(rig)[2:] == ["no-kv"] * 3

    on("1P_2D", check, **LOCAL)


def test_b18_an_id_of_the_client_comes_before_the_history() -> None:
    async def check(rig: Rig) -> None:
        for session in ("ann", "bob", "ann", "bob"):
            await rig.complete([*PROMPT, *range(rig.state.n_requests)], session=session)
        assert Counter(sessions(rig)).most_common() == [(sessions(rig)[0], 2), (sessions(rig)[1], 2)]
        assert {row["identity"] for row in [await rig.row(n) for n in (1, 2, 3, 4)]} == {"header"}

    on("1P_2D", check, **LOCAL)


def test_b18_the_same_words_under_another_key_are_another_conversation() -> None:
    async def check(rig: Rig) -> None:
        for key in ("ann", "bob"):
            await rig.complete(session="s", headers={"authorization": f"Bearer {key}"})
        assert len(set(sessions(rig))) == 2

    on("1P_2D", check, **LOCAL)


def test_b19_an_unknown_conversation_with_an_answer_in_it_goes_through_p() -> None:
    async def check(rig: Rig) -> None:
        await say(rig, [user("hi"), {"role": "assistant", "content": "hello"}, user("go on")])
        assert (rig.decisions[0].route.value, rig.decisions[0].reason) == ("pd", "no-kv")
        assert (await rig.row())["turn"] == 2

    on("1P_1D", check, **LOCAL)


def test_b20_a_request_id_of_its_own_moves_no_turn() -> None:
    async def check(rig: Rig) -> None:
        homes: dict[str, set[int]] = {}
        for turn in range(3):
            for session in range(18):
                prompt = [session, *PROMPT, *range(turn)]
                headers = {"x-request-id": str(uuid.uuid4())}
                await rig.complete(prompt, n_tokens=2, session=f"s{session}", headers=headers)
                homes.setdefault(f"s{session}", set()).add(rig.decisions[-1].decode_worker)
        assert {len(home) for home in homes.values()} == {1}
        assert len(set.union(*homes.values())) > 1  # all 18 on one of three, by chance: 8 in a thousand million

    on("1P_3D", check, prefill_s=0.0, step_s=0.0005, **LOCAL)


def test_b21_a_restarted_or_a_second_router_places_a_conversation_alike() -> None:
    async def placed() -> list[int]:
        async with routing("1P_3D", prefill_s=0.0, step_s=0.0005, placement="session_affinity", **LOCAL) as rig:
            for session in range(12):
                await rig.complete([session, *PROMPT], n_tokens=2, session=f"user-{session}")
            return [decision.decode_worker for decision in rig.decisions]

    async def main() -> None:
        first, second = await placed(), await placed()
        assert first == second
        assert len(set(first)) == 3

    run(main())


def test_b22_the_oldest_conversations_leave_and_the_table_stays_bounded() -> None:
    async def check(rig: Rig) -> None:
        for session in range(60):
            await rig.complete([session, *PROMPT], n_tokens=1, session=f"s{session}")
        assert rig.state.ledger.n_sessions <= 20
        assert rig.state.identifier.n_sessions <= 20
        assert rig.metric("sessions") <= 20

    on("1P_1D", check, prefill_s=0.0, step_s=0.0005, settings={"max_sessions": 20})


def test_b23_a_failed_turn_counts_for_nothing_and_its_retry_is_the_same_turn() -> None:
    async def check(rig: Rig) -> None:
        d = rig.engines[1]
        await rig.complete(session="s")
        d.behaviour.status = 400
        follow_up = [*PROMPT, 1, 2, 3]
        assert (await rig.complete(follow_up, session="s")).status_code == 400
        d.behaviour.status = None
        assert (await rig.complete(follow_up, session="s")).status_code == 200
        assert [(await rig.row(n))["turn"] for n in (1, 2, 3)] == [1, 2, 2]

    on("1P_1D", check, **LOCAL)


def test_b23_a_turn_that_failed_may_be_asked_differently_and_is_still_of_its_conversation() -> None:
    async def check(rig: Rig) -> None:
        d = rig.engines[1]
        said = text_of(await rig.chat([user("hello there")], stream=True))
        history = [user("hello there"), {"role": "assistant", "content": said}]
        d.behaviour.status = 400
        assert (await rig.chat([*history, user("thsi")])).status_code == 400
        d.behaviour.status = None
        assert (await rig.chat([*history, user("this")])).status_code == 200
        rows = [await rig.row(n) for n in (1, 2, 3)]
        assert [row["turn"] for row in rows] == [1, 2, 2]
        assert len({row["session_id"] for row in rows}) == 1
        assert rows[2]["route"] == "local"

    on("1P_1D", check, **LOCAL)


def test_b23_two_turns_of_one_conversation_at_once_are_both_answered_and_the_second_is_not_trusted() -> None:
    async def check(rig: Rig) -> None:
        await rig.complete(session="s")
        twice = [rig.complete([*PROMPT, 9], 20, session="s") for _ in range(2)]  # a client that retries too early
        assert [answer.status_code for answer in await asyncio.gather(*twice)] == [200, 200]
        assert sorted(reasons(rig)[1:]) == ["always-local", "concurrent"]
        await rig.complete(session="t")
        forked = [rig.complete([*PROMPT, 9, i], 20, session="t") for i in range(2)]
        assert [answer.status_code for answer in await asyncio.gather(*forked)] == [200, 200]
        assert sorted(reasons(rig)[4:]) == ["always-local", "no-kv"]

    on("1P_1D", check, **LOCAL)


def test_b24_after_a_restart_or_a_cache_reset_d_is_not_believed_to_hold_anything() -> None:
    async def check(rig: Rig) -> None:
        d = rig.engines[1]
        await rig.complete(session="s")
        await rig.complete([*PROMPT, 1], session="s")
        assert reasons(rig)[-1] == "always-local"
        port = d.port
        await d.stop()
        await until(lambda: not rig.state.fleet.available(1), within_s=10.0)
        await d.start(port)
        await until(lambda: rig.state.fleet.available(1), within_s=10.0)
        await rig.complete([*PROMPT, 1, 2], session="s")
        assert (rig.decisions[-1].route.value, reasons(rig)[-1]) == ("pd", "no-kv")

    on("1P_1D", check, **LOCAL)


def test_b24_a_restart_that_nobody_saw_is_noticed_by_the_engines_start_time() -> None:
    async def check(rig: Rig) -> None:
        d = rig.engines[1]
        await until(lambda: rig.state.ledger.view(0.0, "").kv_usage_ratio[1] is not None, within_s=10.0)  # scraped once
        await rig.complete(session="s")
        d.cached.clear()
        d.start_s += 100.0
        resets = [entry for entry in rig.entries if type(entry).__name__ == "WorkerReset"]
        await until(
            lambda: len([e for e in rig.entries if type(e).__name__ == "WorkerReset"]) > len(resets), within_s=10.0
        )
        await until(lambda: rig.state.fleet.available(1))  # a new process must generate before it gets turns
        await rig.complete([*PROMPT, 1], session="s")
        assert reasons(rig)[-1] == "no-kv"

    on("1P_1D", check, **LOCAL)


@pytest.mark.parametrize("kind", ["ids", "code"])
def test_b25_a_follow_up_turns_length_is_known_within_five_percent(kind: str) -> None:
    """Here with a fake's tokens; with those of a real tokenizer, on CJK and tools too, in the tests of ``PromptSizer``."""
    code = "def f(x):\n    return x * 2  # twice\n" * 8

    async def check(rig: Rig) -> None:
        messages, prompt = [user(code * 3)], list(range(300))
        for turn in range(4):
            if kind == "ids":
                answer = await rig.complete(prompt, 20, session="s", return_token_ids=True)
                prompt += [*answer.json()["choices"][0]["token_ids"], *range(30)]
            else:
                said = await say(rig, messages, headers={"x-session-id": "s"})
                messages += [said, user(code + str(turn))]
        for number in range(2, 5):
            row = await rig.row(number)
            counted = len(prompts_of(rig.engines[1].bodies[number - 1])[0])
            assert row["context_tokens"] + row["input_tokens"] == pytest.approx(counted, rel=0.05)

    on("1P_1D", check, prefill_s=0.0, step_s=0.0005, **LOCAL)


def test_b26_what_d_is_known_to_hold_is_not_new() -> None:
    async def check(rig: Rig) -> None:
        first = await rig.complete(list(range(200)), 20, session="s", return_token_ids=True)
        held = [*range(200), *first.json()["choices"][0]["token_ids"]]
        await rig.complete([*held, *range(50)], 20, session="s")
        row = await rig.row(2)
        assert (row["context_tokens"], row["input_tokens"]) == (220, 50)

    on("1P_1D", check, **LOCAL)


def test_b22_deciding_costs_the_same_with_many_conversations() -> None:
    """Bounds are generous: the real figures are the benchmark's."""
    from ppd_bench.core.point import PlacementSpec, PolicySpec
    from ppd_bench.core.topology import parse_topology
    from ppd_bench.policy.events import Finished, Sent
    from ppd_bench.policy.ledger import Ledger
    from ppd_bench.policy.policy import make_policy
    from ppd_bench.policy.query import RouteQuery

    topology = parse_topology("2P_2D")
    policy, ledger = make_policy(topology, PolicySpec(decider="always_local"), PlacementSpec(), 0), Ledger(topology)

    def turn(i: int, number: int, now_s: float) -> float:
        query = RouteQuery(f"s{i}.t{number}", f"s{i}", number, 0, 100, 50)
        began_s = perf_counter()
        decision = policy.decide(query, ledger.view(now_s, query.session_id))
        ledger.observe(Sent(now_s, query.request_id, query.session_id, number, 100, 50, decision))
        ledger.observe(Finished(now_s, query.request_id, True, 20))
        return perf_counter() - began_s

    few = sorted(turn(i % 100, 1 + i // 100, i * 1e-3) for i in range(2000))[1000]
    for i in range(20_000):
        turn(i, 1, 3.0 + i * 0.1)  # many of them old enough to leave, in the end
    many = sorted(turn(i * 7 % 20_000, 2, 2003.0 + i * 0.1) for i in range(20_000))
    assert many[10_000] < 10 * few
    assert many[19_800] < 0.01


def test_a_client_that_closes_on_seeing_done_has_had_its_answer_and_is_known_at_its_next_turn() -> None:
    async def check(rig: Rig) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "a question that is asked of a model"}]
        for _ in range(4):
            body = {"model": "fake", "messages": messages, "max_tokens": 8, "stream": True}
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.running.port)
            content = orjson.dumps(body)
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ncontent-length: %d\r\n\r\n" % len(content))
            writer.write(content)
            seen = await reader.readuntil(b"data: [DONE]")
            writer.transport.abort()
            deltas = [orjson.loads(line[6:])["choices"] for line in seen.splitlines() if line.startswith(b"data: {")]
            text = "".join(choices[0]["delta"].get("content") or "" for choices in deltas if choices)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and then?"}]
        await until(lambda: len(rig.rows()) == 4)
        assert [row["status"] for row in rig.rows()] == ["ok"] * 4
        assert [row["turn"] for row in rig.rows()] == [1, 2, 3, 4]
        assert [row["identity"] for row in rig.rows()] == ["new", "chain", "chain", "chain"]

    on("1P_1D", check)
