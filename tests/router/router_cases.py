"""A whole router over fake engines, and requests to it, for the tests of its behaviours."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
import orjson
import yaml
from fake_engine import Behaviour, FakeEngine

from ppd_bench.core.decision import Decision
from ppd_bench.core.topology import parse_topology
from ppd_bench.policy.events import Sent
from ppd_bench.router.breaker import BreakerSettings
from ppd_bench.router.fleet import FleetSettings
from ppd_bench.router.settings import RouterSettings
from ppd_bench.router.state import LogEntry, RouterState
from ppd_bench.runner.router import RouterOptions, Running, prepare_router, running_router

FAST = FleetSettings(scrape_s=0.1, look_s=0.1, breaker=BreakerSettings(open_s=0.2, max_open_s=0.4))
PROMPT = list(range(64))
"""Four blocks of 16."""


@dataclass
class Rig:
    """A running router: its engines in the order of the topology's workers, and a client."""

    engines: list[FakeEngine]
    running: Running
    http: httpx.AsyncClient
    folder: Path
    entries: list[LogEntry] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    @property
    def state(self) -> RouterState:
        return self.running.state

    @property
    def decisions(self) -> list[Decision]:
        """What was decided, in order, fallbacks included."""
        return [entry.decision for entry in self.entries if isinstance(entry, Sent)]

    def named(self, *names: str) -> list[FakeEngine]:
        by_name = {engine.name: engine for engine in self.engines}
        return [by_name[name] for name in names]

    async def complete(
        self, prompt: Any = None, n_tokens: int = 8, *, session: str | None = None, **more: Any
    ) -> httpx.Response:
        """A completion, by default of ``PROMPT`` and not streamed."""
        headers = more.pop("headers", {}) | ({"x-session-id": session} if session else {})
        body = {"model": "fake", "prompt": PROMPT if prompt is None else prompt, "max_tokens": n_tokens, **more}
        return await self.http.post("/v1/completions", content=orjson.dumps(body), headers=headers)

    async def chat(self, messages: list[dict[str, Any]], n_tokens: int = 8, **more: Any) -> httpx.Response:
        headers = more.pop("headers", {})
        body = {"model": "fake", "messages": messages, "max_tokens": n_tokens, **more}
        return await self.http.post("/v1/chat/completions", content=orjson.dumps(body), headers=headers)

    def metric(self, name: str, **labels: str) -> float:
        """A value of the router's own /metrics, 0 where there is none."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        for line in self.state.metrics.exposition().decode().splitlines():
            head, _, value = line.rpartition(" ")
            if head.partition("{")[0] == f"ppd_router_{name}" and all(label in head for label in wanted):
                return float(value)
        return 0.0

    def rows(self) -> list[dict[str, Any]]:
        """The decision log's turns that are on disk."""
        found = sorted(self.folder.glob("log/*.jsonl"))
        lines = [orjson.loads(line) for path in found for line in path.read_bytes().splitlines()]
        return [line for line in lines if "kind" not in line]

    async def row(self, n: int = 1) -> dict[str, Any]:
        """The n-th row, as soon as it is there."""
        await until(lambda: len(self.rows()) >= n)
        return self.rows()[n - 1]


Check = Callable[[Rig], Awaitable[None]]


@asynccontextmanager
async def routing(topology: str, *, settings: dict[str, Any] | None = None, **more: Any) -> AsyncIterator[Rig]:
    """A router over fakes. ``settings`` are the router's; ``more`` goes to the fakes' behaviour or to ``RouterOptions``.

    ``layout``: the fakes that the endpoints file lists, where they are not all of the topology's.
    """
    ours = set(RouterOptions.__dataclass_fields__)
    options = {name: more.pop(name) for name in list(more) if name in ours}
    workers = parse_topology(more.pop("layout", topology)).workers
    engines = [await FakeEngine(w.worker_id, behaviour=Behaviour(**more)).start() for w in workers]
    entries: list[LogEntry] = []
    told: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        content = [{"role": e.name[0], "url": f"http://{e.host}:{e.port}"} for e in engines]
        (folder / "endpoints.yaml").write_text(yaml.safe_dump({"engines": content}))
        prepared = prepare_router(
            RouterOptions(
                topology=topology,
                endpoints=folder / "endpoints.yaml",
                port=0,
                settings=RouterSettings(**{"drain_s": 5.0, **(settings or {})}),
                log=options.pop("log", None) or log_in(folder),
                fleet=options.pop("fleet", FAST),
                **options,
            )
        )
        try:
            async with running_router(prepared, tell=told.append, record=entries.append) as running:
                url = f"http://127.0.0.1:{running.port}"
                async with httpx.AsyncClient(base_url=url, timeout=20.0, trust_env=False) as http:
                    await until(lambda: all(is_proven(worker) for worker in running.state.fleet.status()["workers"]))
                    for engine in engines:
                        engine.forget()
                    yield Rig(engines, running, http, folder, entries, told)
        finally:
            for engine in engines:
                await engine.stop()


def is_proven(worker: dict[str, Any]) -> bool:
    """Whether an engine has generated for the router, or there is none in that place."""
    return bool(worker["proven"] or worker["url"] is None)


def log_in(folder: Path) -> Any:
    from ppd_bench.router.decision_log import LogSettings

    return LogSettings(folder=folder / "log")


def on(topology: str, check: Check, *, within_s: float = 60.0, **more: Any) -> None:
    """Run a check on a router of its own; one that hangs fails."""

    async def main() -> None:
        async with routing(topology, **more) as rig:
            await check(rig)

    run(main(), within_s)


def run(main: Coroutine[Any, Any, None], within_s: float = 60.0) -> None:
    asyncio.run(asyncio.wait_for(main, within_s))


async def until(condition: Callable[[], object], within_s: float = 10.0) -> None:
    """Wait for something to become true; fail when it does not in time."""
    end_s = perf_counter() + within_s
    while not condition():
        assert perf_counter() < end_s, "it did not happen in time"
        await asyncio.sleep(0.005)


def events_of(answer: httpx.Response) -> list[Any]:
    """The events of a streamed answer; ``[DONE]`` as text."""
    data = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
    return [text if text == "[DONE]" else orjson.loads(text) for text in data]


def text_of(answer: httpx.Response) -> str:
    """What a streamed answer says, first choice."""
    choices = [event["choices"][0] for event in events_of(answer) if event != "[DONE]" and event.get("choices")]
    return "".join(c.get("text") or (c.get("delta") or {}).get("content") or "" for c in choices)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def raw_request(path: str, body: dict[str, Any], **headers: str) -> bytes:
    """A request as bytes, for clients that hang up."""
    content = orjson.dumps(body)
    lines = [f"POST {path} HTTP/1.1", "Host: router", f"Content-Length: {len(content)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + content
