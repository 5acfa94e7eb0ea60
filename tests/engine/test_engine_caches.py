"""Cache resets: the answer's body decides, not its status."""

from __future__ import annotations

import asyncio

import pytest
from scripted_server import Script, scripted_server

from ppd_bench.core.errors import EngineError
from ppd_bench.engine.caches import reset_caches
from ppd_bench.engine.control import control_client

YES, NO = (200, '{"success":true}'), (200, '{"success":false}')
POST = "POST /reset_prefix_cache"


def reset(*scripts: Script, patience_s: float = 5.0) -> tuple[tuple[str, ...], list[list[str]]]:
    async def run() -> tuple[tuple[str, ...], list[list[str]]]:
        async with control_client() as client:
            with (
                scripted_server(scripts[0], worker_id="P0") as (p, p_seen),
                scripted_server(scripts[-1]) as (d, d_seen),
            ):
                return await reset_caches(client, [p, d], patience_s=patience_s), [p_seen, d_seen]

    return asyncio.run(run())


def test_every_engine_is_reset_with_its_connectors_tier() -> None:
    unproven, seen = reset({POST: [YES]})
    assert unproven == ()
    assert seen == [[f"{POST}?reset_external=true"]] * 2


def test_a_refusal_with_status_200_is_asked_again_until_blocks_are_free() -> None:
    unproven, seen = reset({POST: [NO, NO, YES]}, {POST: [YES]})
    assert unproven == ()
    assert [len(requests) for requests in seen] == [3, 1]


def test_old_engines_that_answer_nothing_are_reset_without_proof() -> None:
    assert reset({POST: [YES]}, {POST: [(200, "")]})[0] == ("D0",)


def test_all_engines_that_cannot_be_reset_are_said_at_once_with_what_to_do() -> None:
    with pytest.raises(EngineError) as caught:
        reset({POST: [NO]}, {}, patience_s=0.0)
    first, second = str(caught.value).splitlines()
    assert first.startswith("P0 (http://127.0.0.1:")
    assert "still refuses to reset its prefix cache after 0 s" in first
    assert second.startswith("D0 (http://127.0.0.1:")
    assert second.endswith("has no /reset_prefix_cache; start it with VLLM_SERVER_DEV_MODE=1 in its environment")


@pytest.mark.parametrize("body", ["[]", '{"ok":true}', "done"])
def test_an_answer_that_is_not_vllms_proves_nothing(body: str) -> None:
    with pytest.raises(EngineError, match="cannot reset the prefix cache: not the answer of a vLLM"):
        reset({POST: [YES]}, {POST: [(200, body)]})
