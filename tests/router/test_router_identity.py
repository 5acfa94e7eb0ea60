"""Whose turn a request is (B18, B19, B20, B23): chats and completions, with and without an id of the client."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd_bench.router.chain import AnswerMessage
from ppd_bench.router.identity import Identifier, Identity

Body = dict[str, Any]
SYSTEM = {"role": "system", "content": "You answer briefly."}


def user(text: str) -> Body:
    return {"role": "user", "content": text}


def assistant(text: str) -> Body:
    return {"role": "assistant", "content": text}


def chat(*messages: Body, **more: Any) -> Body:
    return {"model": "m", "messages": list(messages), **more}


class Asker:
    """Plays a client and a router: one instant per call."""

    def __init__(self, **settings: Any) -> None:
        self.table = Identifier(**settings)
        self.now_s = 0.0

    def ask(self, body: Body, *, tenant: str = "", **headers: str) -> Identity:
        self.now_s += 1.0
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.table.identify(headers=names, body=body, now_s=self.now_s, tenant=tenant)

    def turn(self, body: Body, answer: str | AnswerMessage | None, *, tenant: str = "", **headers: str) -> Identity:
        identity = self.ask(body, tenant=tenant, **headers)
        self.table.answered(identity, body=body, answer=answer, now_s=self.now_s)
        return identity


# -- chats without an id ---------------------------------------------------------------------------------------------


def test_b18_a_conversation_is_found_by_everything_up_to_its_last_answer() -> None:
    asker = Asker()
    history = [SYSTEM, user("hi")]
    first = asker.turn(chat(*history), "Hello!")
    assert (first.turn, first.source, first.follows) == (1, "new", False)
    for turn in range(2, 6):
        history += [assistant("Hello!"), user(f"go on {turn}")]
        found = asker.turn(chat(*history), "Hello!")
        assert (found.session_id, found.turn, found.source, found.follows) == (first.session_id, turn, "chain", True)
    assert asker.table.n_sessions == 1


def test_b18_two_users_who_say_hi_are_two_conversations() -> None:
    asker = Asker()
    one, two = asker.turn(chat(user("hi")), "Hello, Ann?"), asker.turn(chat(user("hi")), "Hello, Bob?")
    assert one.session_id != two.session_id
    again = asker.turn(chat(user("hi"), assistant("Hello, Bob?"), user("yes")), "Good.")
    assert (again.session_id, again.turn) == (two.session_id, 2)


def test_b18_users_who_got_the_same_answer_too_stay_apart_as_long_as_each_goes_on() -> None:
    asker = Asker()
    started = {asker.turn(chat(user("hi")), "Hello!").session_id for _ in range(20)}
    assert len(started) == 20
    second = [asker.ask(chat(user("hi"), assistant("Hello!"), user(f"I am {i}"))) for i in range(20)]
    assert {identity.session_id for identity in second} == started
    assert {identity.turn for identity in second} == {2}


def test_b18_users_whose_equal_beginnings_have_unknown_answers_are_not_guessed_apart() -> None:
    asker = Asker()
    one, two = (asker.turn(chat(user("hi")), None) for _ in range(2))
    later = asker.ask(chat(user("hi"), assistant("Hello!"), user("go on")))
    assert later.session_id not in (one.session_id, two.session_id)
    assert (later.turn, later.follows) == (2, False)


def test_an_answer_that_the_router_did_not_see_still_finds_the_next_turn() -> None:
    asker = Asker()
    first = asker.turn(chat(user("a rare beginning")), None)
    found = asker.ask(chat(user("a rare beginning"), assistant("whatever"), user("go on")))
    assert (found.session_id, found.turn, found.follows) == (first.session_id, 2, True)


def test_b18_a_fork_is_a_conversation_of_its_own_that_holds_no_kv() -> None:
    asker = Asker()
    start = [user("tell me a story"), assistant("Once upon a time")]
    first = asker.turn(chat(start[0]), "Once upon a time")
    trunk = asker.turn(chat(*start, user("a sad one")), "He died.")
    fork = asker.turn(chat(*start, user("a gay one")), "They laughed.")
    assert trunk.session_id == first.session_id
    assert fork.session_id != first.session_id
    assert (fork.turn, fork.follows) == (2, False)
    trunk3 = asker.ask(chat(*start, user("a sad one"), assistant("He died."), user("why?")))
    fork3 = asker.ask(chat(*start, user("a gay one"), assistant("They laughed."), user("why?")))
    assert (trunk3.session_id, trunk3.turn, trunk3.follows) == (first.session_id, 3, True)
    assert (fork3.session_id, fork3.turn, fork3.follows) == (fork.session_id, 3, True)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_b18_an_edit_anywhere_in_the_history_ends_the_conversation(place: int) -> None:
    asker = Asker()
    history = [SYSTEM, user("one"), assistant("two"), user("three")]
    first = asker.turn(chat(*history[:2]), "two")
    asker.turn(chat(*history), "four")
    edited = [dict(message) for message in history]
    edited[place]["content"] += "!"
    found = asker.ask(chat(*edited, assistant("four"), user("five")))
    assert found.session_id != first.session_id
    assert (found.turn, found.follows) == (3, False)


@pytest.mark.parametrize(
    "change",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"cache_salt": "b"},
        {"model": "other"},
    ],
)
def test_what_changes_the_prompt_from_its_start_ends_the_conversation(change: Body) -> None:
    asker = Asker()
    first = asker.turn(chat(user("hi")), "Hello!")
    follow = chat(user("hi"), assistant("Hello!"), user("go on"))
    assert asker.ask({**follow, **change}).session_id != first.session_id
    assert asker.ask({**follow, "temperature": 0.3, "max_tokens": 9}).session_id == first.session_id


def test_b18_tenants_never_share_a_conversation() -> None:
    asker = Asker()
    follow = chat(user("hi"), assistant("Hello!"), user("go on"))
    ann = asker.turn(chat(user("hi")), "Hello!", tenant="ann")
    assert asker.ask(follow, tenant="bob").session_id != ann.session_id
    assert asker.ask(follow, tenant="ann").session_id == ann.session_id


def test_b18_a_sub_agent_with_its_own_system_prompt_leaves_its_parent_alone() -> None:
    asker = Asker()
    parent = asker.turn(chat(SYSTEM, user("plan a trip")), "First a hotel.")
    child = asker.turn(chat({"role": "system", "content": "You book hotels."}, user("plan a trip")), "Booked.")
    assert child.session_id != parent.session_id
    later = asker.ask(chat(SYSTEM, user("plan a trip"), assistant("First a hotel."), user("and then?")))
    assert (later.session_id, later.turn) == (parent.session_id, 2)


def test_b19_an_unknown_conversation_with_an_answer_in_it_is_a_later_turn_without_kv() -> None:
    asker = Asker()
    body = chat(user("a"), assistant("b"), user("c"), assistant("d"), user("e"))
    found = asker.turn(body, "f")
    assert (found.turn, found.source, found.follows) == (3, "new", False)
    later = asker.ask(chat(*body["messages"], assistant("f"), user("g")))
    assert (later.session_id, later.turn, later.follows) == (found.session_id, 4, True)


def test_b21_an_unknown_conversation_has_one_id_in_every_process_and_at_every_turn() -> None:
    history = [SYSTEM, user("a"), assistant("b"), user("c")]
    longer = [*history, assistant("d"), user("e")]
    ids = {Asker().ask(chat(*messages)).session_id for messages in (history, history, longer)}
    assert len(ids) == 1
    forked = Asker()
    assert forked.ask(chat(*history)).session_id != forked.ask(chat(*longer)).session_id  # both live: told apart


def test_b20_a_request_id_changes_nothing() -> None:
    asker = Asker()
    first = asker.turn(chat(user("hi")), "Hello!", x_request_id="1")
    found = asker.ask(chat(user("hi"), assistant("Hello!"), user("go on")), x_request_id="2")
    assert found.session_id == first.session_id
    one, two = (Asker().ask(chat(user("hi")), x_session_id="s", x_request_id=i).session_id for i in "12")
    assert one == two


# -- messages as clients spell them ----------------------------------------------------------------------------------

CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"where": "here", "n": 1}'}}


def test_tool_calls_and_their_results_are_turns_of_one_conversation() -> None:
    asker = Asker()
    body = chat(SYSTEM, user("look around"), tools=[{"type": "function", "function": {"name": "look"}}])
    first = asker.turn(body, AnswerMessage(content=None, tool_calls=[CALL]))
    echoed = {"role": "assistant", "content": "", "tool_calls": [CALL], "refusal": None, "reasoning_content": "hm"}
    body["messages"] += [echoed, {"role": "tool", "tool_call_id": "call_1", "content": "a wall"}]
    second = asker.turn(body, "A wall.")
    assert (second.session_id, second.turn, second.follows) == (first.session_id, 2, True)
    other = asker.ask(chat(*body["messages"][:-1], {"role": "tool", "content": "a door"}, tools=body["tools"]))
    assert other.session_id != first.session_id


@pytest.mark.parametrize("answer", ["", "Let me look.", None])
def test_tool_calls_that_the_router_did_not_see_do_not_break_the_chain(answer: str | None) -> None:
    asker = Asker()
    first = asker.turn(chat(user("look around")), answer)
    echoed = {"role": "assistant", "content": answer, "tool_calls": [CALL]}
    found = asker.ask(chat(user("look around"), echoed, {"role": "tool", "content": "a wall"}))
    assert (found.session_id, found.turn) == (first.session_id, 2)


@pytest.mark.parametrize(
    "spelling",
    [
        {"role": "assistant", "content": "Hello\nthere"},
        {"role": "assistant", "content": " Hello\nthere\n"},
        {"role": "assistant", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "\nthere"}]},
        {"role": "assistant", "content": "Hello\nthere", "tool_calls": None, "function_call": None, "audio": None},
        {"content": "Hello\nthere", "reasoning": "why", "role": "assistant", "tool_calls": []},
    ],
)
def test_an_answer_is_known_again_however_its_client_spells_it(spelling: Body) -> None:
    asker = Asker()
    first = asker.turn(chat(user("hi")), "Hello\nthere")
    assert asker.ask(chat(user("hi"), spelling, user("go on"))).session_id == first.session_id


def test_arguments_of_tool_calls_count_by_their_value() -> None:
    asker = Asker()
    first = asker.turn(chat(user("look")), AnswerMessage(tool_calls=[CALL]))
    respelled = {**CALL, "function": {"name": "look", "arguments": '{"n":1,"where":"here"}'}}
    body = chat(user("look"), {"role": "assistant", "content": None, "tool_calls": [respelled]}, user("go on"))
    assert asker.ask(body).session_id == first.session_id


def test_an_answer_whose_beginning_the_client_gave_is_one_message_afterwards() -> None:
    asker = Asker()
    body = chat(user("name a poem"), assistant("The "), continue_final_message=True, add_generation_prompt=False)
    first = asker.turn(body, "Raven")
    assert first.turn == 1
    found = asker.ask(chat(user("name a poem"), assistant("The Raven"), user("by whom?")))
    assert (found.session_id, found.turn) == (first.session_id, 2)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": None, "prompt": None},
        {"messages": [None, 3, "x", [], {"role": 5, "content": {"a": [1]}}, {"role": "assistant", "tool_calls": 7}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}, 4, None]}], "model": 4},
        {"messages": [{"role": "user", "content": [3, {"type": "image_url", "image_url": {"url": "x"}}, None]}]},
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": [1, "x", -4]},
        {"prompt": ""},
        {"prompt": [], "session_id": True, "session_params": 3},
        {"prompt": "\ud800", "session_params": {"session_id": 12}},
    ],
)
def test_any_json_object_gets_an_identity(body: Body) -> None:
    asker = Asker()
    for answer in ("x", None, AnswerMessage(content=None, tool_calls=[CALL], token_ids=[1])):
        assert asker.turn(body, answer).turn >= 1


# -- ids of the client -----------------------------------------------------------------------------------------------


def test_b18_ids_are_taken_in_their_order() -> None:
    every = {
        "session_id": "b",
        "session_params": {"session_id": "c"},
        "prompt_cache_key": "d",
        "user": "e",
        "messages": [user("hi")],
    }
    asker = Asker(use_cache_key=True)
    sources = [asker.ask(every, x_session_id="a").source]
    for field in ("session_id", "session_params", "prompt_cache_key", "user"):
        sources.append(asker.ask(every).source)
        del every[field]
    assert sources == ["header", "body", "session_params", "prompt_cache_key", "user"]
    assert Asker().ask(chat(user("hi"), user="e", prompt_cache_key="d")).source == "new"


def test_b21_a_clients_id_gives_one_session_id_in_every_process() -> None:
    bodies = [chat(user("hi")), chat(user("hi"), assistant("Hello!"), user("go on")), {"model": "m", "prompt": "hi"}]
    ids = {Asker().ask(body, x_session_id="s").session_id for body in bodies}
    ids |= {Asker().ask({**body, "session_id": "s"}).session_id for body in bodies}
    assert len(ids) == 1


def test_an_id_shared_by_sub_agents_names_a_group_of_conversations() -> None:
    asker = Asker()
    parent = asker.turn(chat(SYSTEM, user("plan")), "Hotel first.", x_session_id="s")
    child = asker.turn(chat(user("book a hotel")), "Booked.", x_session_id="s")
    assert child.session_id != parent.session_id
    assert child.turn == 1
    later = asker.turn(chat(SYSTEM, user("plan"), assistant("Hotel first."), user("done")), "Ok.", x_session_id="s")
    assert (later.session_id, later.turn, later.source, later.follows) == (parent.session_id, 2, "header", True)
    again = asker.ask(chat(user("book a hotel"), assistant("Booked."), user("where?")), x_session_id="s")
    assert (again.session_id, again.turn) == (child.session_id, 2)


def test_a_group_that_starts_anew_from_its_first_message_is_a_new_conversation() -> None:
    asker = Asker()
    ids = set()
    for i in range(4):
        first = asker.turn(chat(user("hi")), f"Hello {i}", x_session_id="s")
        asker.turn(chat(user("hi"), assistant(f"Hello {i}"), user("go on")), "Yes.", x_session_id="s")
        ids.add(first.session_id)
        assert (first.turn, first.follows) == (1, False)
    assert len(ids) == 4


# -- the counter -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [{}, {"x_session_id": "s"}])
def test_b23_the_counter_moves_only_with_completed_answers(headers: dict[str, str]) -> None:
    asker = Asker()
    first = asker.turn(chat(user("hi")), "Hello!", **headers)
    follow = chat(user("hi"), assistant("Hello!"), user("go on"))
    for _ in range(3):  # three tries without an answer
        tried = asker.ask(follow, **headers)
        assert (tried.session_id, tried.turn) == (first.session_id, 2)
    for _ in range(3):  # and three that are answered, each anew
        retried = asker.turn(follow, "Yes.", **headers)
        assert (retried.session_id, retried.turn) == (first.session_id, 2)
    third = asker.ask(chat(*follow["messages"], assistant("Yes."), user("more")), **headers)
    assert (third.session_id, third.turn) == (first.session_id, 3)


def test_b23_a_first_turn_under_an_id_is_idempotent() -> None:
    asker = Asker()
    tries = [asker.ask(chat(user("hi")), x_session_id="s"), *[asker.turn(chat(user("hi")), "A", x_session_id="s")] * 2]
    assert len({identity.session_id for identity in tries}) == 1
    assert {identity.turn for identity in tries} == {1}


@pytest.mark.parametrize("shown", ["first answer", "second answer"])
def test_b23_whichever_of_two_answers_a_client_keeps_its_conversation_goes_on(shown: str) -> None:
    asker = Asker()
    first = asker.turn(chat(user("hi")), "Hello!")
    follow = chat(user("hi"), assistant("Hello!"), user("go on"))
    asker.turn(follow, "first answer")
    asker.turn(follow, "second answer")
    found = asker.ask(chat(*follow["messages"], assistant(shown), user("more")))
    assert (found.session_id, found.turn) == (first.session_id, 3)


def test_b23_concurrent_turns_that_differ_do_not_share_a_conversation() -> None:
    asker = Asker()
    first = asker.turn(chat(user("hi")), "Hello!")
    bodies = [chat(user("hi"), assistant("Hello!"), user(text)) for text in ("this", "that")]
    this, that = (asker.ask(body) for body in bodies)
    assert (this.session_id, this.follows) == (first.session_id, True)
    assert that.session_id != first.session_id
    assert (that.turn, that.follows) == (2, False)
    for identity, body in zip((that, this), bodies[::-1], strict=True):  # they end in the other order
        asker.table.answered(identity, body=body, answer="Done.", now_s=asker.now_s)
    for identity, body in zip((this, that), bodies, strict=True):
        later = asker.ask(chat(*body["messages"], assistant("Done."), user("more")))
        assert (later.session_id, later.turn) == (identity.session_id, 3)


def test_b23_a_turn_that_was_stopped_may_be_asked_differently() -> None:
    asker = Asker()
    first = asker.turn(chat(user("hi")), "Hello!")
    stopped = asker.ask(chat(user("hi"), assistant("Hello!"), user("thsi")))
    asker.table.abandoned(stopped)
    again = asker.ask(chat(user("hi"), assistant("Hello!"), user("this")))
    assert (again.session_id, again.turn, again.follows) == (first.session_id, 2, True)


def test_b23_a_late_answer_of_a_turn_that_is_over_changes_nothing() -> None:
    asker = Asker()
    first_body = chat(user("hi"))
    first = asker.turn(first_body, "Hello!")
    follow = chat(user("hi"), assistant("Hello!"), user("go on"))
    asker.turn(follow, "Yes.")
    asker.table.answered(first, body=first_body, answer="Good day!", now_s=asker.now_s)
    third = asker.ask(chat(*follow["messages"], assistant("Yes."), user("more")))
    assert (third.session_id, third.turn) == (first.session_id, 3)


# -- completions -----------------------------------------------------------------------------------------------------


def test_a_completion_follows_the_prompt_and_answer_that_it_starts_with() -> None:
    asker = Asker()
    prompt = "User: " + "tell me " * 300 + "\nBot:"
    first = asker.turn({"model": "m", "prompt": prompt}, " Once upon a time.")
    for turn in range(2, 6):
        prompt += " Once upon a time." + "\nUser: go on 続き\nBot:"
        found = asker.turn({"model": "m", "prompt": prompt}, " Once upon a time.")
        assert (found.session_id, found.turn, found.source, found.follows) == (first.session_id, turn, "chain", True)


@pytest.mark.parametrize("nested", [False, True])
def test_so_does_a_completion_of_token_ids(nested: bool) -> None:
    asker = Asker()
    ids = list(range(1000))
    answer = AnswerMessage(content="as text", token_ids=[7, 8, 9])
    first = asker.turn({"prompt": [ids] if nested else ids}, answer)
    ids = [*ids, 7, 8, 9, 5, 5, 5]
    second = asker.turn({"prompt": [ids] if nested else ids}, answer)
    assert (second.session_id, second.turn, second.follows) == (first.session_id, 2, True)
    assert asker.ask({"prompt": [*ids[:-1], 4, 7, 8, 9, 1]}).session_id != first.session_id


def test_a_completion_whose_answer_ids_are_unknown_goes_on_from_its_prompt() -> None:
    asker = Asker()
    first = asker.turn({"prompt": [1, 2, 3]}, "text only")
    assert asker.ask({"prompt": [1, 2, 3]}).session_id != first.session_id
    found = asker.ask({"prompt": [1, 2, 3, 9, 9, 9]})
    assert (found.session_id, found.turn) == (first.session_id, 2)


def test_completions_that_begin_alike_are_told_apart_by_their_answers() -> None:
    asker = Asker()
    system = "You are a helpful program. " * 100
    prompts = [f"{system}Question {i % 5}:" for i in range(200)]
    firsts = [asker.turn({"prompt": prompt}, f" answer {i}").session_id for i, prompt in enumerate(prompts)]
    seconds = [asker.ask({"prompt": f"{prompt} answer {i} and?"}) for i, prompt in enumerate(prompts)]
    assert len(set(firsts)) == 200
    assert [identity.session_id for identity in seconds] == firsts


def test_the_same_completion_asked_twice_is_two_conversations_unless_an_id_says_otherwise() -> None:
    asker = Asker()
    assert len({asker.turn({"prompt": "hi"}, "Hello").session_id for _ in range(5)}) == 5
    assert len({asker.turn({"prompt": "hi"}, "Hello", x_session_id="s").session_id for _ in range(5)}) == 1


# -- bounds ----------------------------------------------------------------------------------------------------------


def test_a_conversation_is_forgotten_after_its_time() -> None:
    asker = Asker(ttl_s=100.0)
    first = asker.turn(chat(user("hi")), "Hello!")
    follow = chat(user("hi"), assistant("Hello!"), user("go on"))
    asker.now_s += 98.0
    assert asker.turn(follow, "Yes.").session_id == first.session_id
    asker.now_s += 99.0
    later = asker.ask(chat(*follow["messages"], assistant("Yes."), user("more")))
    assert (later.session_id == first.session_id, later.turn, later.follows) == (False, 3, False)


def test_the_table_never_grows_beyond_its_bound_and_drops_the_longest_unused() -> None:
    asker = Asker(max_sessions=50)
    kept = asker.turn(chat(user("keep me")), "Yes.", x_session_id="kept")
    history = [user("keep me")]
    for i in range(1000):
        asker.turn(chat(user(f"other {i}")), "Hm.")
        if i % 20 == 0:
            history += [assistant("Yes."), user("still?")]
            assert asker.turn(chat(*history), "Yes.", x_session_id="kept").session_id == kept.session_id
        assert asker.table.n_sessions <= 50
    table = asker.table
    assert len(table._by_key) <= 3 * 50


def test_nothing_is_left_of_conversations_that_are_over() -> None:
    asker = Asker(ttl_s=1000.0)
    for i in range(200):
        asker.turn(chat(user("hi"), x=i), "Hello!")
        asker.turn({"prompt": "x" * i}, "yes")
        asker.turn({"prompt": [1, 2, i]}, None)
    asker.now_s += 1000.0
    for _ in range(400):
        asker.ask({"prompt": "z"}, x_session_id="z")
    table = asker.table
    assert table.n_sessions == 1
    assert (table._by_key, table._lengths.n_blocks) == ({}, 0)


ACTIONS = st.lists(
    st.tuples(
        st.integers(0, 3),  # which client
        st.sampled_from(["say", "say", "retry", "abandon", "edit", "again"]),
        st.sampled_from(["yes", "no"]),
        st.booleans(),
    ),
    max_size=40,
)


@given(ACTIONS, st.booleans(), st.booleans())
def test_whatever_clients_do_a_turn_that_follows_continues_what_was_answered(
    actions: list[tuple[int, str, str, bool]], named: bool, completions: bool
) -> None:
    """The answered history of every conversation, kept beside the table, is a true prefix of each turn that ``follows``."""
    asker = Asker()
    answered: dict[str, list[list[str]]] = {}
    histories: list[list[str]] = [["hi"] for _ in range(4)]
    for client, action, word, completes in actions:
        history = histories[client]
        if action == "again":
            history[:] = ["hi"]
        elif action == "edit" and len(history) > 1:
            history[0] += "!"
        body = _body(history, completions)
        identity = asker.ask(body, **({"x_session_id": f"s{client // 2}"} if named else {}))
        if identity.follows:
            assert any(
                history[: len(past)] == past and len(past) < len(history) for past in answered[identity.session_id]
            )
        if action == "abandon" or not completes:
            asker.table.abandoned(identity) if action == "abandon" else None
            continue
        asker.table.answered(identity, body=body, answer=word, now_s=asker.now_s)
        answered.setdefault(identity.session_id, []).append([*history, word])
        if action != "retry":
            history += [word, "and?"]


def _body(history: list[str], completions: bool) -> Body:
    if completions:
        return {"prompt": "\n".join(history) + "\n"} if len(history) == 1 else {"prompt": _joined(history)}
    roles = ("user", "assistant")
    return chat(*({"role": roles[i % 2], "content": text} for i, text in enumerate(history)))


def _joined(history: list[str]) -> str:
    return "".join(text if i % 2 else f"{text}\n" for i, text in enumerate(history))
