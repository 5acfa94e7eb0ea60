"""The router in front of four real vLLM engines (2P_2D, tiny model, CPU), talked to by the OpenAI client: a chat replay whose
paths are proven by the engines' own counters, clients that leave, and KV memory that comes back.

Everything is started as a user starts it: ``ppd-bench serve`` and ``ppd-bench router``, each a process.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ppd_bench.engine.endpoints import EndpointSet, load_endpoints
from ppd_bench.engine.metrics import EngineCounters, EngineScrape, counters_between, read_scrape

ENGINE_PYTHON = os.environ.get("PPD_BENCH_ENGINE_PYTHON")
PROGRAM = [sys.executable, "-c", "from ppd_bench.cli.main import main; main()"]
N_CONVERSATIONS, N_TURNS, N_TOKENS = 50, 4, 12
START_S = 600.0
PATIENCE = ("--prefill-timeout", "300", "--first-byte-timeout", "300", "--idle-timeout", "300")
"""A first step of a new batch size can stall a CPU engine for longer than the router's own limits."""

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(ENGINE_PYTHON is None, reason="PPD_BENCH_ENGINE_PYTHON names no interpreter with vLLM"),
]


class Said:
    """A program that runs, and the lines that it has said."""

    def __init__(self, *arguments: str) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [*PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.append(line)

    def wait_for(self, pattern: str) -> None:
        until = time.monotonic() + START_S
        while not any(re.search(pattern, line) for line in self.lines):
            assert self.process.poll() is None, "".join(self.lines[-20:])
            assert time.monotonic() < until, "".join(self.lines[-20:])
            time.sleep(0.2)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)
        self._listener.join(10)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The endpoints file of a 2P_2D that is up."""
    out = tmp_path_factory.mktemp("serve")
    serve = Said("serve", "2P_2D", "--sweep", "cpu", "--device", "cpu", "--engine-python", str(ENGINE_PYTHON),
                 "--out", str(out))  # fmt: skip
    try:
        serve.wait_for("endpoints: ")
        yield out / "endpoints.yaml"
    finally:
        serve.stop()


@contextmanager
def routing(engines: Path, log: Path, *policy: str) -> Iterator[str]:
    """A router's address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    router = Said("router", "--topology", "2P_2D", "--endpoints", str(engines), "--port", str(port), "--log", str(log),
                  "--kv-lease", "300", *PATIENCE, *policy)  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 120
        while not is_ready(url):
            assert router.process.poll() is None, "".join(router.lines)
            assert time.monotonic() < until, "".join(router.lines)
            time.sleep(0.5)
        yield url
    finally:
        router.stop()
    assert router.process.returncode == 0, "".join(router.lines)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=60.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def converse(url: str, model: str, number: int) -> list[str]:
    """One conversation of the OpenAI client; every other one streams."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300.0)
    messages: list[Any] = [{"role": "system", "content": f"You are number {number}. " + "Answer in short words. " * 6}]
    answers = []
    for turn in range(N_TURNS):
        messages.append({"role": "user", "content": f"question {turn} of {number}: what is {number * 7 + turn}?"})
        asked: dict[str, Any] = {
            "model": model, "messages": messages, "max_tokens": N_TOKENS, "temperature": 0,
            "extra_body": {"ignore_eos": True, "min_tokens": N_TOKENS},
        }  # fmt: skip
        if number % 2:
            pieces = client.chat.completions.create(stream=True, **asked)
            text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        else:
            text = client.chat.completions.create(**asked).choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        answers.append(text)
    client.close()
    return answers


def log_rows(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]
    return [row for row in rows if row.get("path") == "/v1/chat/completions"]


def scrapes(endpoints: EndpointSet) -> dict[str, EngineScrape]:
    """What every engine says of itself."""
    pages = {e.worker_id: httpx.get(f"{e.url}/metrics", timeout=60.0, trust_env=False) for e in endpoints.endpoints}
    return {worker: read_scrape(page.text) for worker, page in pages.items()}


def replay(
    engines: Path, log: Path, *policy: str, n_conversations: int = N_CONVERSATIONS
) -> tuple[list[dict[str, Any]], dict[str, EngineCounters]]:
    """Every conversation through a router: its log, and what each engine's counters grew by."""
    endpoints = load_endpoints(engines.read_text(), file=str(engines))
    with routing(engines, log, *policy) as url:
        model = httpx.get(f"{url}/v1/models", timeout=60.0, trust_env=False).json()["data"][0]["id"]
        before = scrapes(endpoints)
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda number: converse(url, model, number), range(n_conversations)))
        after = scrapes(endpoints)
    assert [len(turns) for turns in answers] == [N_TURNS] * n_conversations
    grown = {worker: counters_between(before[worker], now) for worker, now in after.items()}
    return log_rows(log), grown


def test_200_turns_of_chat_take_both_paths_and_the_engines_say_so_too(engines: Path, tmp_path: Path) -> None:
    rows, grown = replay(engines, tmp_path / "log", "--policy", "fraction", "--x", "0.5")
    assert len(rows) == N_CONVERSATIONS * N_TURNS
    assert {row["status"] for row in rows} == {"ok"}
    followups = [row for row in rows if row["turn"] > 1]
    assert len(followups) == N_CONVERSATIONS * (N_TURNS - 1)
    assert 0.3 < sum(row["route"] == "local" for row in followups) / len(followups) < 0.7
    for conversation in {row["session_id"] for row in rows}:
        assert len({row["decode_worker"] for row in rows if row["session_id"] == conversation}) == 1
    for decoder in ("D0", "D1"):
        own = [row for row in rows if row["decode_worker"] == decoder]
        through_p = sum(row["context_tokens"] + row["input_tokens"] for row in own if row["route"] == "pd")
        assert (
            0 < (grown[decoder].external_kv_transfer_tokens or 0) <= 1.1 * through_p
        )  # 1.1: chat prompts' lengths are estimates
        # A local turn finds its last prompt again; the answer's text may be tokenised otherwise than it was generated.
        assert (grown[decoder].local_cache_hit_tokens or 0) > 0
    prefilled = sum(row["route"] == "pd" for row in rows)
    assert prefilled >= N_CONVERSATIONS
    assert not any(grown[p].external_kv_transfer_tokens for p in ("P0", "P1"))
    stages = ("t_decided_s", "t_p_sent_s", "t_p_done_s", "t_d_sent_s", "t_first_byte_s", "t_done_s")
    for row in rows:
        instants = [row["t_recv_s"], *(row[name] for name in stages if row.get(name) is not None)]
        assert instants == sorted(instants)
        assert abs((instants[-1] - instants[0]) - (row["end_s"] - row["sent_s"])) <= 0.001


def moved(grown: dict[str, EngineCounters]) -> float:
    return sum(grown[d].external_kv_transfer_tokens or 0.0 for d in ("D0", "D1"))


def test_forced_routes_are_what_the_engines_count(engines: Path, tmp_path: Path) -> None:
    rows, grown = replay(engines, tmp_path / "pd", "--policy", "always_pd", n_conversations=12)
    assert {row["route"] for row in rows} == {"pd"}
    moved_always = moved(grown)
    rows, grown = replay(engines, tmp_path / "local", "--policy", "always_local", n_conversations=12)
    assert {row["route"] for row in rows if row["turn"] > 1} == {"local"}
    moved_once = moved(grown)
    assert 0 <= moved_once < moved_always


def kv_usage(endpoints: EndpointSet) -> list[float | None]:
    return [scrape.gauges.kv_cache_usage_ratio for scrape in scrapes(endpoints).values()]


def test_clients_that_leave_give_their_kv_memory_back(engines: Path, tmp_path: Path) -> None:
    # Not tried: the instant at which P has finished and nobody has heard of it yet. A client that leaves then leaves its blocks
    # on P until the lease ends: the router can neither abort what is over nor tell D of a handle that it has not seen.
    endpoints = load_endpoints(engines.read_text(), file=str(engines))
    with routing(engines, tmp_path / "log", "--policy", "always_pd") as url:
        model = httpx.get(f"{url}/v1/models", timeout=60.0, trust_env=False).json()["data"][0]["id"]
        for number in range(12):
            with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as client:
                body = json.dumps({"model": model, "prompt": [20 + number] * 500, "max_tokens": 200, "stream": True,
                                   "ignore_eos": True}).encode()  # fmt: skip
                head = f"POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-length: {len(body)}\r\n\r\n".encode()
                client.sendall(head + body)
                if number % 2:
                    while b"data:" not in client.recv(65536):  # in the stream
                        pass
                else:
                    time.sleep(0.001 * number)  # while P works
        until = time.monotonic() + 60.0
        while (used := kv_usage(endpoints)) != [0.0] * 4 and time.monotonic() < until:
            time.sleep(0.5)
        assert used == [0.0] * 4
        status = httpx.get(f"{url}/status", timeout=60.0, trust_env=False).json()
        assert status["gauges"]["open_requests"] == 0
