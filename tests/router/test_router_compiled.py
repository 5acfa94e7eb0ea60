"""Where the simulator is compiled, so is the data path of the router, and it serves as a process of its own."""

from __future__ import annotations

import ast
import asyncio
import importlib
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeEngine
from router_cases import events_of, run, text_of, user

from ppd_bench.engine.ports import free_ports
from ppd_bench.sim.kernel import compiled

BUILD = Path(__file__).resolve().parents[2] / ".ci" / "build_backend" / "ppd_build.py"
PROGRAM = """
import ppd_bench.router.turns
assert not ppd_bench.router.turns.__file__.endswith(".py")
from ppd_bench.cli.main import main
main()
"""

pytestmark = pytest.mark.skipif(not compiled(), reason="the package runs interpreted here: there is nothing to look at")


def modules() -> list[str]:
    """What the build compiles, read without importing it: its own dependencies need not be here."""
    if not BUILD.is_file():
        pytest.skip(f"no sources of the build at {BUILD}")
    for statement in ast.parse(BUILD.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") == "MODULES":
            return list(ast.literal_eval(statement.value))
    raise AssertionError(f"{BUILD} lists no MODULES")


def test_every_module_that_the_build_compiles_is_compiled() -> None:
    names = modules()
    assert any(name.startswith("ppd_bench.router.") for name in names)
    interpreted = [name for name in names if str(importlib.import_module(name).__file__).endswith(".py")]
    assert interpreted == []


@asynccontextmanager
async def routing(folder: Path) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """A compiled router in front of a P and a D, in a process that finds no sources; its address."""
    engines = [await FakeEngine(name).start() for name in ("P0", "D0")]
    rows = "".join(f'  - {{role: {e.name[0]}, url: "http://{e.host}:{e.port}"}}\n' for e in engines)
    (folder / "endpoints.yaml").write_text(f"engines:\n{rows}", encoding="utf-8")
    port = free_ports(1, 1)[0]
    options = ["--topology", "1P_1D", "--endpoints", "endpoints.yaml", "--policy", "always_local", "--port", str(port)]
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, "router", *options, cwd=folder)
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        for engine in engines:
            await engine.stop()


async def listening(http: httpx.AsyncClient, process: asyncio.subprocess.Process) -> None:
    while True:
        assert process.returncode is None, "the router ended"
        try:
            await http.get("/health")
            return
        except httpx.TransportError:
            await asyncio.sleep(0.05)


def test_a_compiled_router_answers_remembers_and_ends_when_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            routing(tmp_path) as (url, process),
            httpx.AsyncClient(base_url=url, timeout=20.0, trust_env=False) as http,
        ):
            await listening(http, process)
            asked = {"model": "fake", "messages": [user("hello")], "max_tokens": 5, "stream": True}
            first = await http.post("/v1/chat/completions", json=asked)
            assert first.status_code == 200
            assert events_of(first)[-1] == "[DONE]"
            assert text_of(first)
            history = [user("hello"), {"role": "assistant", "content": text_of(first)}, user("and then?")]
            second = await http.post("/v1/chat/completions", json={**asked, "messages": history, "stream": False})
            assert second.json()["choices"][0]["finish_reason"] == "length"
            metrics = (await http.get("/metrics")).text
            assert 'ppd_router_turns_total{outcome="ok",path="pd"} 1.0' in metrics
            assert 'ppd_router_turns_total{outcome="ok",path="local"} 1.0' in metrics
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0

    run(main(), 60.0)
