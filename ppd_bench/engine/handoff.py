"""The KV hand-off protocol between a prefill and a decode engine. Pure: bodies and answers in, bodies or typed refusals out.

Sources: ROUTER.md B1 to B8; vLLM's NixlConnector (pull) and MooncakeConnector. A wrong hand-off kills a D engine or is silently
wrong KV, so nothing is sent that was not checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from ppd_bench.core.errors import LaunchError

Body = Mapping[str, Any]
"""A request of the completions or the chat API, as JSON content."""

KV_PARAMS = "kv_transfer_params"
LEASE_MARGIN_S = 1.0
"""A handle this close to its lease's end is not sent: D's pull takes time, and D answers 200 from freed blocks after it (B6)."""


class Refusal(StrEnum):
    """Why a hand-off does not happen; also the name of its counter."""

    INCOMPLETE = "handoff_incomplete"
    EXPIRED = "handle_expired"
    MISMATCH = "handle_mismatch"


class Refused(NamedTuple):
    """A hand-off that must not be sent, and what to tell people."""

    reason: Refusal
    message: str


class Peer(NamedTuple):
    """What is known of the P engine apart from its answers; only Mooncake needs it."""

    engine_id: str | None = None
    bootstrap_addr: str | None = None


class Handoff(NamedTuple):
    """A complete handle on KV that a P engine holds for one request until ``expires_s``."""

    params: Mapping[str, Any]
    request_id: str
    prompt: Any
    expires_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Connector:
    """One KV connector's side of the protocol.

    ``prefill_params(transfer_id)`` goes to P. ``decode_params(answer, transfer_id, peer)`` goes to D and must have a value
    for every key of ``required``.
    """

    prefill_params: Callable[[str], dict[str, Any]]
    decode_params: Callable[[Mapping[str, Any], str, Peer], dict[str, Any]]
    required: tuple[str, ...]


def _nixl_prefill(transfer_id: str) -> dict[str, Any]:
    remote = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    return {"do_remote_decode": True, "do_remote_prefill": False, **remote}


def _mooncake_decode(answer: Mapping[str, Any], transfer_id: str, peer: Peer) -> dict[str, Any]:
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "remote_bootstrap_addr": peer.bootstrap_addr,
        "remote_engine_id": peer.engine_id,
    }


CONNECTORS: dict[str, Connector] = {
    "NixlConnector": Connector(
        prefill_params=_nixl_prefill,
        decode_params=lambda answer, transfer_id, peer: dict(answer),
        required=("remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port"),
    ),
    "MooncakeConnector": Connector(
        prefill_params=lambda transfer_id: {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer_id,
        },
        decode_params=_mooncake_decode,
        required=("transfer_id", "remote_bootstrap_addr", "remote_engine_id"),
    ),
}


def find_connector(name: str) -> Connector:
    """The connector of that name.

    Raises:
        LaunchError: no hand-off is known for it.
    """
    if name not in CONNECTORS:
        raise LaunchError(
            f"no KV hand-off is known for connector {name!r}; set engine.kv_connector to {' or '.join(CONNECTORS)}"
        )
    return CONNECTORS[name]


def strip_client_params(body: Body) -> dict[str, Any]:
    """The body without hand-off parameters, which only a dispatcher may set (B1)."""
    return {key: value for key, value in body.items() if key != KV_PARAMS}


def unsplittable(body: Body) -> str | None:
    """Why this request cannot go through P and D as one unit (B3): the name of its counter, or null when it can."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        return "unsplittable_prompt_list"
    for name in ("n", "best_of"):
        if (body.get(name) or 1) > 1:
            return f"unsplittable_{name}"
    if body.get("prompt_logprobs") is not None:
        return "unsplittable_prompt_logprobs"
    if body.get("echo") and body.get("logprobs") is not None:
        return "unsplittable_echo_logprobs"
    return "unsplittable_beam_search" if body.get("use_beam_search") else None


def prefill_body(
    body: Body, connector: Connector, *, transfer_id: str, want_prompt_ids: bool = False
) -> dict[str, Any]:
    """The P leg: the same prompt, one token, not streamed, nothing parsed (B4).

    ``want_prompt_ids`` asks P for the ids of its rendered prompt, to be given to ``decode_body``.
    """
    leg = strip_client_params(body)
    for name in ("stream_options", "return_token_ids", "best_of"):
        leg.pop(name, None)
    for name in ("max_completion_tokens", "max_output_tokens", "min_tokens"):
        if name in leg:
            leg[name] = 1
    if "tools" in leg:
        leg["tool_choice"] = "none"  # the tools stay, since they are part of the rendered prompt
    if want_prompt_ids:
        leg["return_token_ids"] = True
    leg |= {"stream": False, "max_tokens": 1, "n": 1}
    return {**leg, KV_PARAMS: connector.prefill_params(transfer_id)}


def take_handoff(
    connector: Connector,
    answer: Mapping[str, Any] | None,
    *,
    body: Body,
    request_id: str,
    transfer_id: str,
    peer: Peer,
    received_s: float,
    lease_s: float,
) -> Handoff | Refused:
    """The handle in P's answer, if it is complete for this connector (B2). ``received_s``: when the answer was there."""
    params = connector.decode_params(answer or {}, transfer_id, peer)
    missing = [key for key in connector.required if params.get(key) in (None, "", [])]
    if params.get("do_remote_prefill") is not True:
        missing.insert(0, "do_remote_prefill")
    if missing:
        return Refused(
            Refusal.INCOMPLETE, f"P's answer to {request_id} lacks {', '.join(missing)}; is its KV connector on?"
        )
    prompt = _prompt_of(body)
    return Handoff(params=params, request_id=request_id, prompt=prompt, expires_s=received_s + lease_s)


def decode_body(
    body: Body, handoff: Handoff, *, request_id: str, now_s: float, prompt_ids: Sequence[int] | None = None
) -> dict[str, Any] | Refused:
    """The D leg: the client's body with the handle, and usage asked for where it is streamed (B4).

    ``prompt_ids`` replaces the prompt of a completions request by the ids that P rendered (B5). Refused when the handle is
    another request's (B7) or too old (B6).
    """
    if handoff.request_id != request_id or handoff.prompt != _prompt_of(body):
        return Refused(Refusal.MISMATCH, f"the KV handle of {handoff.request_id} does not belong to {request_id}")
    left_s = handoff.expires_s - now_s
    if left_s < LEASE_MARGIN_S:
        return Refused(Refusal.EXPIRED, f"P's lease for {request_id} ends in {left_s:.3g} s: too late to pull its KV")
    leg = {**plain_body(body), KV_PARAMS: dict(handoff.params)}
    if prompt_ids is not None and "prompt" in leg:
        leg["prompt"] = list(prompt_ids)
    return leg


def plain_body(body: Body) -> dict[str, Any]:
    """A leg without a hand-off (local, replica): the client's body, stripped, with usage asked for where it is streamed."""
    leg = strip_client_params(body)
    if leg.get("stream"):
        leg["stream_options"] = {**(leg.get("stream_options") or {}), "include_usage": True}
    return leg


def _prompt_of(body: Body) -> Any:
    return body["prompt"] if "prompt" in body else body.get("messages")
