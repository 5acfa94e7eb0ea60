"""What a router adds to P and D: latency, CPU and streaming capacity, ours beside others, interleaved in one run.

::

    python -m venv VENV && VENV/bin/pip install vllm-router==0.1.17 aiohttp uvicorn uvloop httptools orjson
    python tests/benchmarks/bench_router.py [--venv VENV] [--installed PYTHON] [--rounds 5] [--only NAME ...] [--json FILE]

``--installed`` is the interpreter of an environment in which ppd-bench is installed, so compiled; without it the router that this
interpreter imports is measured, which in a source tree is interpreted. The table says which of the two it was.

Fake engines in a process of their own answer faster than any router asks (``router_peers.py``). Every round measures every target
once; a figure is the median over the rounds. CPU is that of the router's process with all its threads. Absolute figures depend
on the machine and its load; the ratios to vllm-router's, of the same run, are what counts.

- added latency: one request at a time, 2 KB body, one streamed token, against the two hops without a router
- requests/s and CPU per request: the same request, 32 at once
- events/s and CPU per event: 32 streams that D writes as fast as it can
- paced: 32 streams started together, one event each per 20 ms: TTFT, and CPU per event
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import orjson
import uvloop

from ppd_bench.engine.client import Client, Limits

HOST = "127.0.0.1"
PEERS = Path(__file__).resolve().parent / "router_peers.py"
AT_ONCE = 32
STEP_S = 0.02
START_WITHIN_S = 30.0
LIMITS = Limits(idle_s=30.0, first_byte_s=30.0)
BODY_BYTES = 2048
CLI = "from ppd_bench.cli.main import main; main()"
PREFILL = {
    "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    "stream": False,
    "max_tokens": 1,
}


@dataclass(frozen=True)
class Target:
    """Something that answers completions. ``pid`` null: no router, the client makes both hops itself."""

    name: str
    port: int
    pid: int | None
    p_port: int | None = None


@dataclass
class Figures:
    """One list per figure, a value per round."""

    latency_ms: list[float] = field(default_factory=list)
    rate_rps: list[float] = field(default_factory=list)
    cpu_ms_per_request: list[float] = field(default_factory=list)
    events_per_s: list[float] = field(default_factory=list)
    cpu_us_per_event: list[float] = field(default_factory=list)
    paced_ttft_ms: list[float] = field(default_factory=list)
    paced_cpu_us_per_event: list[float] = field(default_factory=list)


def body_of(n_tokens: int) -> bytes:
    head = {"model": "fake", "max_tokens": n_tokens, "stream": True, "temperature": 0.0}
    n = BODY_BYTES - len(orjson.dumps(head)) - len(',"prompt":""')
    return orjson.dumps({**head, "prompt": ("The quick brown fox jumps over the lazy dog. " * 100)[:n]})


def cpu_s(pid: int | None) -> float:
    """CPU seconds of a process, its threads' summed, to the nanosecond."""
    if pid is None:
        return 0.0
    return sum(int(p.read_text().split()[0]) for p in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


async def ask(client: Client, target: Target, body: bytes, first: list[float] | None = None) -> None:
    """One request; ``first`` gets its TTFT."""
    began_s = perf_counter()
    if target.p_port is not None:
        prefilled = await client.post(
            HOST, target.p_port, orjson.dumps({**orjson.loads(body), **PREFILL}), limits=LIMITS
        )
        assert prefilled.ok, prefilled.message
    outcome = await client.post(HOST, target.port, body, limits=LIMITS)
    assert outcome.ok, f"{target.name}: {outcome.message}"
    if first is not None and outcome.first_token_s is not None:
        first.append(outcome.first_token_s - began_s)


async def one_at_a_time(client: Client, target: Target, n: int) -> float:
    """Median seconds per request."""
    body, times = body_of(1), []
    for _ in range(n):
        began_s = perf_counter()
        await ask(client, target, body)
        times.append(perf_counter() - began_s)
    return statistics.median(times)


async def many_at_once(client: Client, target: Target, n: int) -> tuple[float, float]:
    """Requests per second, and CPU seconds per request."""
    left, body = iter(range(n)), body_of(1)

    async def worker() -> None:
        for _ in left:
            await ask(client, target, body)

    cpu_before_s, began_s = cpu_s(target.pid), perf_counter()
    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    return n / (perf_counter() - began_s), (cpu_s(target.pid) - cpu_before_s) / n


async def streams(client: Client, target: Target, n_tokens: int) -> tuple[float, float, float]:
    """Events per second, CPU seconds per event, median TTFT."""
    body, first = body_of(n_tokens), list[float]()
    cpu_before_s, began_s = cpu_s(target.pid), perf_counter()
    await asyncio.gather(*(ask(client, target, body, first) for _ in range(AT_ONCE)))
    n = AT_ONCE * n_tokens
    return n / (perf_counter() - began_s), (cpu_s(target.pid) - cpu_before_s) / n, statistics.median(first)


async def measure(targets: list[tuple[Target, Target]], rounds: int) -> dict[str, Figures]:
    """Every target, as (on unpaced engines, on paced engines), once per round."""
    figures = {fast.name: Figures() for fast, _ in targets}
    async with Client(perf_counter) as client:
        for number in range(rounds + 1):
            for fast, paced in targets:
                seen = Figures() if number == 0 else figures[fast.name]  # the first round warms up
                seen.latency_ms.append(await one_at_a_time(client, fast, 100) * 1e3)
                rate_rps, cost_s = await many_at_once(client, fast, 600)
                seen.rate_rps.append(rate_rps)
                seen.cpu_ms_per_request.append(cost_s * 1e3)
                per_s, cost_s, _ = await streams(client, fast, 300)
                seen.events_per_s.append(per_s)
                seen.cpu_us_per_event.append(cost_s * 1e6)
                _, cost_s, ttft_s = await streams(client, paced, 50)
                seen.paced_ttft_ms.append(ttft_s * 1e3)
                seen.paced_cpu_us_per_event.append(cost_s * 1e6)
    return figures


# -- processes ---------------------------------------------------------------------------------------------------------


@contextmanager
def running(command: list[str], *, quiet: bool = True, cwd: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else None,
        text=True,
        start_new_session=True,
        cwd=cwd,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def ports_of(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} printed no port")
    return [int(word) for word in line.split()]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[str]) -> None:
    end_s = time.monotonic() + START_WITHIN_S
    while time.monotonic() < end_s:
        try:
            socket.create_connection((HOST, port), 0.2).close()
            return
        except OSError:
            if process.poll() is not None:
                raise RuntimeError(f"{process.args!r} ended with {process.returncode}") from None
            time.sleep(0.1)
    raise RuntimeError(f"{process.args!r} did not listen within {START_WITHIN_S:g} s")


def relay(python: str, what: str) -> Callable[[ExitStack, int, int], tuple[int, int]]:
    def start(stack: ExitStack, p_port: int, d_port: int) -> tuple[int, int]:
        process = stack.enter_context(running([python, str(PEERS), what, str(p_port), str(d_port)], quiet=False))
        return ports_of(process)[0], process.pid

    return start


def vllm_router(program: Path) -> Callable[[ExitStack, int, int], tuple[int, int]]:
    def start(stack: ExitStack, p_port: int, d_port: int) -> tuple[int, int]:
        port = free_port()
        command = [str(program), "--vllm-pd-disaggregation", "--prefill", f"http://{HOST}:{p_port}"]
        command += ["--decode", f"http://{HOST}:{d_port}", "--policy", "round_robin", "--kv-connector", "nixl"]
        command += ["--host", HOST, "--port", str(port), "--prometheus-port", str(free_port())]
        command += ["--log-level", "error", "--worker-startup-check-interval", "1"]
        process = stack.enter_context(running([*command]))
        wait_for(port, process)
        return port, process.pid

    return start


def build_of(python: str, folder: Path) -> str:
    """Whether this interpreter's router is compiled or interpreted, and where it is. Asked in a folder without sources."""
    program = "import ppd_bench.router.turns as t; print(t.__file__)"
    found = subprocess.run([python, "-c", program], cwd=folder, capture_output=True, text=True)
    if found.returncode != 0:
        raise RuntimeError(f"{python} cannot import ppd_bench: {found.stderr.strip().splitlines()[-1]}")
    return f"{'interpreted' if found.stdout.strip().endswith('.py') else 'compiled'}, {found.stdout.strip()}"


def ppd_bench_router(folder: Path, python: str = sys.executable) -> Callable[[ExitStack, int, int], tuple[int, int]]:
    def start(stack: ExitStack, p_port: int, d_port: int) -> tuple[int, int]:
        port = free_port()
        endpoints = folder / f"endpoints-{port}.yaml"
        rows = [f'  - {{role: {r}, url: "http://{HOST}:{p}"}}\n' for r, p in (("P", p_port), ("D", d_port))]
        endpoints.write_text("engines:\n" + "".join(rows), encoding="utf-8")
        command = [python, "-c", CLI, "router", "--topology", "1P_1D", "--endpoints", str(endpoints)]
        command += ["--policy", "always_pd", "--host", HOST, "--port", str(port)]
        process = stack.enter_context(running(command, cwd=folder))
        wait_for(port, process)
        return port, process.pid

    return start


# -- the table ---------------------------------------------------------------------------------------------------------


def medians(figures: dict[str, Figures]) -> dict[str, dict[str, float]]:
    direct = figures["direct"]
    rows = {}
    for name, seen in figures.items():
        row = {key: statistics.median(values) for key, values in vars(seen).items()}
        row["added_ms"] = statistics.median(a - b for a, b in zip(seen.latency_ms, direct.latency_ms, strict=True))
        rows[name] = row
    return rows


COLUMNS = (
    ("added latency, ms", "added_ms", "{:.2f}"),
    ("CPU/request, ms", "cpu_ms_per_request", "{:.3f}"),
    ("requests/s, 32 at once", "rate_rps", "{:.0f}"),
    ("CPU/event, us", "cpu_us_per_event", "{:.1f}"),
    ("events/s, unpaced", "events_per_s", "{:,.0f}"),
    ("TTFT of 32 paced, ms", "paced_ttft_ms", "{:.1f}"),
    ("CPU/event paced, us", "paced_cpu_us_per_event", "{:.1f}"),
)


def show(rows: dict[str, dict[str, float]], reference: str) -> str:
    lines = ["".join([f"{'':26}", *(f"{name:>24}" for name in rows)])]
    for title, key, form in COLUMNS:
        cells = []
        for name, row in rows.items():
            value = form.format(row[key])
            base = rows.get(reference, {}).get(key)
            ratio = f" ({row[key] / base:.2f}x)" if base and name != reference else ""
            cells.append(f"{value + ratio:>24}")
        lines.append(f"{title:26}" + "".join(cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--venv", type=Path, help="a virtual environment with vllm-router==0.1.17 (and, for the peer, aiohttp)"
    )
    parser.add_argument(
        "--installed",
        type=Path,
        default=Path(sys.executable),
        help="interpreter whose ppd-bench is measured (default: this)",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", help="measure these targets beside 'direct'")
    parser.add_argument("--json", type=Path, help="write the medians here")
    options = parser.parse_args()
    installed = str(options.installed.absolute())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        starts = {
            "bare relay": relay(sys.executable, "bare"),
            "ppd-bench router": ppd_bench_router(folder, installed),
        }
        print("ppd-bench router:", build_of(installed, folder))
        if options.venv is not None:
            python = options.venv / "bin" / "python"
            starts |= {
                "aiohttp": relay(str(python), "aiohttp"),
                "uvicorn": relay(str(python), "uvicorn"),
                "vllm-router": vllm_router(python.with_name("vllm-router")),
            }
        elif not options.only:
            print("vllm-router, aiohttp and uvicorn: skipped; give --venv FOLDER of an environment that has them")
        pairs: dict[str, list[Target]] = {}
        for step_s in (0.0, STEP_S):
            p, d = ports_of(
                stack.enter_context(running([sys.executable, str(PEERS), "engines", str(step_s)], quiet=False))
            )
            pairs.setdefault("direct", []).append(Target("direct", d, None, p))
            for name, start in starts.items():
                if options.only and name not in options.only:
                    continue
                try:
                    port, pid = start(stack, p, d)
                except (RuntimeError, OSError) as error:
                    print(f"{name}: skipped, {error}")
                    continue
                pairs.setdefault(name, []).append(Target(name, port, pid))
        targets = [(fast, paced) for fast, paced in pairs.values()]
        rows = medians(uvloop.run(measure(targets, options.rounds)))
    print(f"medians of {options.rounds} rounds; in brackets against vllm-router of this run")
    print(show(rows, "vllm-router"))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
