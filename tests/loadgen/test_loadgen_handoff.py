"""The hand-off protocol: what may go to P and to D (ROUTER.md B1 to B7)."""

from __future__ import annotations

from typing import Any

import pytest
from loadgen_cases import body_of

from ppd_bench.core.errors import LaunchError
from ppd_bench.engine.handoff import (
    CONNECTORS,
    LEASE_MARGIN_S,
    Handoff,
    Peer,
    Refusal,
    Refused,
    decode_body,
    find_connector,
    plain_body,
    prefill_body,
    take_handoff,
    unsplittable,
)

NIXL = CONNECTORS["NixlConnector"]
MOONCAKE = CONNECTORS["MooncakeConnector"]
ANSWER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e",
    "remote_request_id": "cmpl-r-p1",
    "remote_block_ids": [4, 5],
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}
BODY = body_of(temperature=0.0, min_tokens=8)


def take(answer: dict[str, Any] | None, *, connector: Any = NIXL, peer: Peer | None = None) -> Handoff | Refused:
    return take_handoff(
        connector,
        answer,
        body=BODY,
        request_id="r",
        transfer_id="r-p1",
        peer=peer or Peer(),
        received_s=100.0,
        lease_s=30.0,
    )


def test_b1_parameters_that_a_client_sends_reach_no_engine() -> None:
    sneaky = {**BODY, "kv_transfer_params": {"do_remote_prefill": True}}
    assert "kv_transfer_params" not in plain_body(sneaky)
    assert prefill_body(sneaky, NIXL, transfer_id="t")["kv_transfer_params"]["do_remote_prefill"] is False
    handoff = take(ANSWER)
    assert isinstance(handoff, Handoff)
    leg = decode_body(sneaky, handoff, request_id="r", now_s=100.0)
    assert isinstance(leg, dict)
    assert leg["kv_transfer_params"] == ANSWER


@pytest.mark.parametrize("lost", sorted(ANSWER.keys() - {"do_remote_decode", "tp_size"}))
def test_b2_an_answer_that_lacks_any_part_of_the_handle_is_refused_by_name(lost: str) -> None:
    for answer in ({k: v for k, v in ANSWER.items() if k != lost}, {**ANSWER, lost: None}):
        refused = take(answer)
        assert isinstance(refused, Refused)
        assert refused.reason is Refusal.INCOMPLETE
        assert lost in refused.message


def test_b2_no_handle_at_all_is_refused() -> None:
    assert isinstance(take(None), Refused)


def test_b2_mooncake_needs_the_peers_address_and_uses_the_dispatchers_transfer_id() -> None:
    refused = take({}, connector=MOONCAKE)
    assert isinstance(refused, Refused)
    assert "remote_bootstrap_addr, remote_engine_id" in refused.message
    handoff = take({}, connector=MOONCAKE, peer=Peer(engine_id="e", bootstrap_addr="http://10.0.0.1:8998"))
    assert isinstance(handoff, Handoff)
    assert handoff.params == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": "r-p1",
        "remote_bootstrap_addr": "http://10.0.0.1:8998",
        "remote_engine_id": "e",
    }
    assert prefill_body(BODY, MOONCAKE, transfer_id="r-p1")["kv_transfer_params"]["transfer_id"] == "r-p1"


@pytest.mark.parametrize(
    ("more", "counter"),
    [
        ({"prompt": ["a", "b"]}, "unsplittable_prompt_list"),
        ({"prompt": [[1, 2], [3]]}, "unsplittable_prompt_list"),
        ({"n": 2}, "unsplittable_n"),
        ({"best_of": 2}, "unsplittable_best_of"),
        ({"prompt_logprobs": 0}, "unsplittable_prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "unsplittable_echo_logprobs"),
        ({"use_beam_search": True}, "unsplittable_beam_search"),
        ({"prompt": ["a"]}, None),
        ({"prompt": [[1, 2]]}, None),
        ({"prompt": [1, 2], "n": 1, "echo": True}, None),
    ],
)
def test_b3_requests_that_cannot_be_split_are_told_apart(more: dict[str, Any], counter: str | None) -> None:
    assert unsplittable({**BODY, **more}) == counter


def test_b4_the_p_leg_is_the_same_prompt_for_one_token_and_nothing_else() -> None:
    chat = {
        **BODY,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "max_completion_tokens": 9,
        "best_of": 1,
        "tools": [{"type": "function"}],
        "tool_choice": "auto",
    }
    leg = prefill_body(chat, NIXL, transfer_id="t")
    assert leg == {
        "model": "fake",
        "prompt": BODY["prompt"],
        "temperature": 0.0,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "min_tokens": 1,
        "n": 1,
        "stream": False,
        "tools": [{"type": "function"}],
        "tool_choice": "none",
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }


def test_b4_the_d_leg_is_the_clients_body_with_the_handle_and_usage() -> None:
    handoff = take(ANSWER)
    assert isinstance(handoff, Handoff)
    leg = decode_body(BODY, handoff, request_id="r", now_s=100.0)
    assert leg == {**BODY, "stream_options": {"include_usage": True}, "kv_transfer_params": ANSWER}


def test_b5_ids_that_p_rendered_can_replace_the_prompt() -> None:
    handoff = take(ANSWER)
    assert isinstance(handoff, Handoff)
    leg = decode_body(BODY, handoff, request_id="r", now_s=100.0, prompt_ids=[9, 8])
    assert isinstance(leg, dict)
    assert leg["prompt"] == [9, 8]
    assert prefill_body(BODY, NIXL, transfer_id="t", want_prompt_ids=True)["return_token_ids"] is True


def test_b6_a_handle_near_the_end_of_its_lease_is_refused() -> None:
    handoff = take(ANSWER)
    assert isinstance(handoff, Handoff)
    last_s = 130.0 - LEASE_MARGIN_S
    assert isinstance(decode_body(BODY, handoff, request_id="r", now_s=last_s), dict)
    refused = decode_body(BODY, handoff, request_id="r", now_s=last_s + 0.01)
    assert isinstance(refused, Refused)
    assert refused.reason is Refusal.EXPIRED


@pytest.mark.parametrize("change", [{"request_id": "other"}, {"prompt": [1, 2, 3]}])
def test_b7_a_handle_serves_only_the_request_and_prompt_it_came_from(change: dict[str, Any]) -> None:
    handoff = take(ANSWER)
    assert isinstance(handoff, Handoff)
    body = {**BODY, "prompt": change.get("prompt", BODY["prompt"])}
    refused = decode_body(body, handoff, request_id=change.get("request_id", "r"), now_s=100.0)
    assert isinstance(refused, Refused)
    assert refused.reason is Refusal.MISMATCH


def test_a_connector_without_a_known_hand_off_is_an_error_that_names_those_that_have_one() -> None:
    with pytest.raises(LaunchError, match=r"P2pNcclConnector.*NixlConnector or MooncakeConnector"):
        find_connector("P2pNcclConnector")
