"""ROUTER.md B1 to B8: what engines are sent, and what they never are."""

from __future__ import annotations

from typing import Any

import pytest
from router_cases import PROMPT, Rig, events_of, on, text_of, user

ROUTED_TO_P = {"decider": "always_pd"}


def body_without(body: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in names}


def test_b1_client_supplied_kv_transfer_params_never_reach_d() -> None:
    async def check(rig: Rig) -> None:
        p, d = rig.engines
        forged = {"do_remote_prefill": True, "remote_host": "10.0.0.9", "remote_port": 1}
        assert (await rig.complete(session="s", kv_transfer_params=forged)).status_code == 200
        answer = await rig.complete([*PROMPT, 1, 2], session="s", kv_transfer_params=forged)
        assert answer.status_code == 200
        assert [body.get("kv_transfer_params", {}).get("remote_host") for body in d.bodies] == [p.host, None]
        assert p.bodies[0]["kv_transfer_params"]["do_remote_prefill"] is False
        assert rig.decisions[-1].route.value == "local"

    on("1P_1D", check, decider="always_local")


def test_b2_a_handle_that_lacks_a_field_never_reaches_d_and_is_counted() -> None:
    async def check(rig: Rig) -> None:
        p, d = rig.engines
        p.behaviour.drop_params = ("remote_block_ids",)
        answer = await rig.complete()
        assert answer.status_code == 200
        assert [body.get("kv_transfer_params") for body in d.bodies] == [None]
        row = await rig.row()
        assert (row["route"], row["decided_route"], row.get("x")) == (
            "pd_fallback_local",
            "pd",
            None,
        )
        assert row["counters"] == ["handoff_incomplete"]
        assert rig.metric("events_total", event="handoff_incomplete") == 1.0

    on("1P_1D", check)


def test_b2_without_the_fallback_an_incomplete_handle_is_a_503() -> None:
    async def check(rig: Rig) -> None:
        rig.engines[0].behaviour.drop_params = ("remote_host",)
        answer = await rig.complete()
        assert answer.status_code == 503
        assert "remote_host" in answer.json()["error"]["message"]
        assert not rig.engines[1].bodies

    on("1P_1D", check, settings={"local_fallback": False})


@pytest.mark.parametrize(
    ("more", "counter", "n_choices"),
    [
        ({"prompt": [[1, 2, 3], [4, 5, 6]]}, "unsplittable_prompt_list", 2),
        ({"prompt": ["one text", "another"]}, "unsplittable_prompt_list", 2),
        ({"n": 3}, "unsplittable_n", 3),
        ({"best_of": 2}, "unsplittable_best_of", 1),
        ({"prompt_logprobs": 1}, "unsplittable_prompt_logprobs", 1),
        ({"echo": True, "logprobs": 1}, "unsplittable_echo_logprobs", 1),
        ({"use_beam_search": True}, "unsplittable_beam_search", 1),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_b3_what_cannot_be_split_stays_on_one_engine_and_is_counted(
    more: dict[str, Any], counter: str, n_choices: int, stream: bool
) -> None:
    async def check(rig: Rig) -> None:
        p, d = rig.engines
        answer = await rig.complete(**{"prompt": PROMPT, **more}, stream=stream)
        assert answer.status_code == 200
        if stream:
            choices = {event["choices"][0]["index"] for event in events_of(answer)[:-1]}
        else:
            choices = {choice["index"] for choice in answer.json()["choices"]}
        assert choices == set(range(n_choices))
        assert (p.counts.n_requests, d.counts.n_requests) == (0, 1)
        assert rig.metric("events_total", event=counter) == 1.0
        row = await rig.row()
        assert (row["route"], row["reason"], row["counters"]) == ("local", counter, [counter])

    on("1P_1D", check, **ROUTED_TO_P)


@pytest.mark.parametrize("stream", [False, True])
def test_b4_p_gets_one_token_and_d_gets_the_clients_body(stream: bool) -> None:
    body = {
        "temperature": 0.3, "stop": ["\n"], "tools": [{"type": "function", "function": {"name": "f"}}], "min_tokens": 4,
        "stream_options": {"continuous_usage_stats": False}, "unknown_field": {"kept": [1, 2]}, "stream": stream,
    }  # fmt: skip

    async def check(rig: Rig) -> None:
        p, d = rig.engines
        assert (await rig.chat([user("hi")], **body)).status_code == 200
        (to_p,), (to_d,) = p.bodies, d.bodies
        assert (to_p["stream"], to_p["max_tokens"], to_p["min_tokens"], to_p["n"]) == (False, 1, 1, 1)
        assert (to_p["tool_choice"], "stream_options" in to_p) == ("none", False)
        assert to_p["tools"] == body["tools"]  # they are part of the rendered prompt
        asked = {"model": "fake", "messages": [user("hi")], "max_tokens": 8, **body}
        if stream:
            asked["stream_options"] = {"continuous_usage_stats": False, "include_usage": True}
        assert body_without(to_d, "kv_transfer_params") == asked

    on("1P_1D", check, **ROUTED_TO_P)


@pytest.mark.parametrize("chat", [False, True])
def test_b4_usage_goes_to_those_who_asked_and_to_no_other(chat: bool) -> None:
    async def check(rig: Rig) -> None:
        async def stream(**options: Any) -> list[Any]:
            ask = rig.chat([user("hi")], stream=True, **options) if chat else rig.complete(stream=True, **options)
            return events_of(await ask)

        silent = await stream()
        asked = await stream(stream_options={"include_usage": True})
        refused = await stream(stream_options={"include_usage": False})
        assert all("usage" not in event for event in (*silent[:-1], *refused[:-1]))
        assert [event["usage"]["completion_tokens"] for event in asked[:-1] if event.get("usage")] == [8]
        assert len(asked) == len(silent) + 1
        rows = [await rig.row(n) for n in (1, 2, 3)]
        assert [row["generated_tokens"] for row in rows] == [8, 8, 8]  # the router knows all the same

    on("1P_1D", check, **ROUTED_TO_P)


def test_b5_both_legs_get_the_same_prompt() -> None:
    async def check(rig: Rig) -> None:
        p, d = rig.engines
        messages = [user("é漢字"), {"role": "assistant", "content": None, "tool_calls": []}, user("x" * 300)]
        for ask in (rig.complete(), rig.complete("text ünd more"), rig.chat(messages)):
            assert (await ask).status_code == 200
        for to_p, to_d in zip(p.bodies, d.bodies, strict=True):
            assert [to_p.get("prompt"), to_p.get("messages")] == [to_d.get("prompt"), to_d.get("messages")]

    on("1P_1D", check, **ROUTED_TO_P)


def test_b6_a_handle_whose_lease_is_over_is_never_sent() -> None:
    async def check(rig: Rig) -> None:
        answer = await rig.complete()
        assert answer.status_code == 200
        assert rig.engines[1].bodies[0].get("kv_transfer_params") is None
        assert (await rig.row())["route"] == "pd_fallback_local"
        assert rig.metric("events_total", event="handle_expired") == 1.0

    on("1P_1D", check, lease_s=0.9, **ROUTED_TO_P)  # the margin before a lease's end is 1 s


def test_b7_every_handle_is_used_once_and_for_its_own_request() -> None:
    async def check(rig: Rig) -> None:
        p, d = rig.engines
        prompts = [[i, *range(40)] for i in range(6)]
        for prompt in prompts + prompts:  # the same requests again: no handle is kept for them
            await rig.complete(prompt)
        handles = [body["kv_transfer_params"]["remote_request_id"] for body in d.bodies]
        assert len(set(handles)) == 12
        made_for = dict(zip(p.request_ids, [body["prompt"] for body in p.bodies], strict=True))
        assert [made_for[handle] for handle in handles] == [body["prompt"] for body in d.bodies]

    on("1P_1D", check, **ROUTED_TO_P)


def test_b8_legs_have_ids_of_their_own_and_the_client_gets_its_own_back() -> None:
    async def check(rig: Rig) -> None:
        answers = [
            await rig.complete(headers={"x-request-id": "same"}, stream=stream) for stream in (False, True, False)
        ]
        assert [answer.headers["x-request-id"] for answer in answers] == ["same"] * 3
        ids = [i for engine in rig.engines for i in engine.request_ids]
        assert len(set(ids)) == len(ids) == 6
        assert not [i for i in ids if "same" in i]
        own = (await rig.complete()).headers["x-request-id"]
        assert own.startswith(rig.state.name)
        for engine in rig.engines:
            assert str(engine.port) not in answers[0].json()["id"]
            assert engine.host not in answers[0].json()["id"]
        assert [(await rig.row(n))["client_request_id"] for n in (1, 2, 3)] == ["same"] * 3

    on("1P_1D", check, **ROUTED_TO_P)


def test_a_stream_says_what_the_plain_answer_says() -> None:
    async def check(rig: Rig) -> None:
        plain, stream = await rig.complete(), await rig.complete(stream=True)
        assert text_of(stream) == plain.json()["choices"][0]["text"]
        assert events_of(stream)[-1] == "[DONE]"
        assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"

    on("1P_1D", check, **ROUTED_TO_P)


def test_a_tool_call_comes_through_in_both_forms_and_its_conversation_goes_on() -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}

    async def check(rig: Rig) -> None:
        for stream in (False, True):
            first = [user(f"weather in Paris {stream}")]
            answer = await rig.chat(first, tools=[tool], stream=stream)
            call = {
                "id": "call-1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
            }
            if not stream:
                assert answer.json()["choices"][0]["message"]["tool_calls"] == [call]
            said = {"role": "assistant", "content": None, "tool_calls": [call]}
            result = {"role": "tool", "tool_call_id": "call-1", "content": "20 degrees"}
            await rig.chat([*first, said, result], tools=[tool])
        routes = [decision.route.value for decision in rig.decisions]
        assert routes == ["pd", "local", "pd", "local"]

    on("1P_1D", check, decider="always_local")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_a_token_is_an_answer(stream: bool) -> None:
    """A load generator rejects it; a client must get what the model said, and the conversation goes on."""

    async def check(rig: Rig) -> None:
        rig.engines[1].behaviour.stop_short = 8
        answer = await rig.complete(stream=stream, session="s")
        assert answer.status_code == 200
        if stream:
            assert events_of(answer)[0]["choices"][0]["finish_reason"] == "stop"
            assert events_of(answer)[-1] == "[DONE]"
        row = await rig.row()
        assert (row["status"], row["generated_tokens"]) == ("ok", 0)
        assert rig.state.fleet.status()["workers"][1]["n_failures"] == 0

    on("1P_1D", check)
