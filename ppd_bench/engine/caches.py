"""Empty prefix caches between points, on every engine, with proof."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import httpx

from ppd_bench.core.errors import EngineError, NotReady
from ppd_bench.engine.control import explain
from ppd_bench.engine.endpoints import Endpoint

RESET = "/reset_prefix_cache"
PATIENCE_S = 30.0
RETRY_S = 0.25


async def reset_caches(
    client: httpx.AsyncClient, endpoints: Sequence[Endpoint], *, patience_s: float = PATIENCE_S
) -> tuple[str, ...]:
    """Reset the prefix cache of every engine, the connector's tier included.

    An engine refuses (status 200 and ``"success": false``) while a request or a KV lease holds blocks; it is asked again
    for ``patience_s`` seconds.

    Returns:
        Engines (worker ids) whose answer had no body, as old versions': their reset is not proven, except by the next
        point's first-turn hit rate.

    Raises:
        EngineError: every engine that could not be reset, one line each.
    """
    found = await asyncio.gather(*(_reset(client, endpoint, patience_s) for endpoint in endpoints))
    problems = [problem for problem, _ in found if problem]
    if problems:
        raise EngineError("\n".join(problems))
    return tuple(e.worker_id for e, (_, proven) in zip(endpoints, found, strict=True) if not proven)


async def _reset(client: httpx.AsyncClient, endpoint: Endpoint, patience_s: float) -> tuple[str | None, bool]:
    """What is wrong (null when nothing is), and whether the engine confirmed the reset."""
    deadline = time.monotonic() + patience_s
    where = f"{endpoint.worker_id} ({endpoint.url})"
    while True:
        try:
            with explain(endpoint, "reset the prefix cache"):
                answer = await client.post(f"{endpoint.url}{RESET}", params={"reset_external": "true"})
                if answer.status_code == httpx.codes.NOT_FOUND:
                    return f"{where}: has no {RESET}; start it with VLLM_SERVER_DEV_MODE=1 in its environment", False
                answer.raise_for_status()
                if not answer.content.strip():
                    return None, False
                if answer.json()["success"] is True:
                    return None, True
        except NotReady as error:
            return str(error), False
        if time.monotonic() >= deadline:
            return (
                f"{where}: still refuses to reset its prefix cache after {patience_s:g} s: a running request or a KV "
                f"lease (engine.kv_lease_s) holds blocks; wait for its end, or restart the engine",
                False,
            )
        await asyncio.sleep(RETRY_S)
