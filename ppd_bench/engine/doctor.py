"""What would keep engines from starting or from being measured, found before it does: facts, then pure checks on them."""

from __future__ import annotations

import os
import re
import resource
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx

from ppd_bench.core.errors import LaunchError, NotReady
from ppd_bench.core.topology import Topology
from ppd_bench.engine.control import explain
from ppd_bench.engine.endpoints import Endpoint
from ppd_bench.engine.launch_plan import HOST, Device
from ppd_bench.engine.metrics import COUNTERS, read_scrape
from ppd_bench.engine.orphans import Orphan, find_orphans
from ppd_bench.engine.ports import port_taken
from ppd_bench.engine.readiness import PROBE_PROMPT
from ppd_bench.engine.vllm_install import VllmInstall, inspect_install

GIB = 1024**3
CPU_ENGINE_BYTES = int(2.5 * GIB)
"""Resident size of one CPU engine with the tiny model (measured: API server 0.6, engine 1.7, helper 0.2 GiB)."""

KV_SPACE_BYTES = 1 * GIB
SHM_BYTES = 1 * GIB
FEW_FILES = 4096
TOO_FEW_FILES = 512
QUERY_GPUS = (
    "nvidia-smi",
    "--query-gpu=index,name,memory.total,memory.used,utilization.gpu",
    "--format=csv,noheader,nounits",
)
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing looked at. ``advice`` is empty where all is well. An ``error`` would stop a launch."""

    level: Level
    what: str
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFact:
    """One GPU as the driver shows it."""

    index: int
    name: str
    total_bytes: int
    used_bytes: int
    utilization_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """This machine. ``gpus`` is null without a driver; ``install`` is null where ``install_problem`` says why."""

    fd_limit: int
    memory_available_bytes: int
    shm_free_bytes: int | None
    gpus: tuple[GpuFact, ...] | None
    ports_taken: tuple[int, ...]
    model_path: str
    model_has_config: bool
    install: VllmInstall | None
    install_problem: str | None
    orphans: tuple[Orphan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointFacts:
    """One running engine. ``problem`` says why nothing more is known; the rest are answers, null when not asked."""

    worker_id: str
    url: str
    problem: str | None = None
    has_cache_reset: bool | None = None
    has_prompt_token_details: bool | None = None
    missing_counters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is to be launched. ``gpu_memory_utilization_ratio`` is the share of each GPU that an engine claims."""

    topology: Topology
    device: Device
    gpu_memory_utilization_ratio: float


# -- checks: pure ----------------------------------------------------------------------------------------------------


def host_findings(facts: HostFacts, wish: Wish) -> tuple[Finding, ...]:
    """Every check of this machine, in the order of a start."""
    findings = [
        _install_finding(facts, wish),
        _model_finding(facts),
        _memory_finding(facts, wish),
        _files_finding(facts),
    ]
    findings += _gpu_findings(facts, wish) if wish.device == "cuda" else []
    findings += [
        Finding(
            level="error", what=f"port {port} is taken on {HOST}", advice="end what listens there, or take other ports"
        )
        for port in facts.ports_taken
    ]
    findings += [
        Finding(
            level="warning",
            what=f"{o.engine.worker_id} (process group {o.engine.group.group_id}, port {o.engine.port}) was started by "
            f"process {o.owner_pid}, which is gone",
            advice="let ppd-bench end it, else it keeps its memory and its port",
        )
        for o in facts.orphans
    ]
    return tuple(findings)


def _install_finding(facts: HostFacts, wish: Wish) -> Finding:
    install = facts.install
    if install is None:
        return Finding(
            level="error", what=facts.install_problem or "no engine interpreter", advice="see --engine-python"
        )
    nixl = install.nixl_version or "absent"
    what = f"{install.python}: {install.package} {install.version} for {install.platform}, nixl {nixl}"
    if install.platform not in (None, wish.device):
        advice = f"--device is {wish.device}: give another --engine-python or --device"
        return Finding(level="error", what=what, advice=advice)
    if install.nixl_version is None and wish.topology.n_prefill:
        return Finding(level="error", what=what, advice=f"run: {install.python} -m pip install nixl")
    return Finding(level="ok", what=what)


def _model_finding(facts: HostFacts) -> Finding:
    if facts.model_has_config:
        return Finding(level="ok", what=f"model {facts.model_path}: a folder with config.json")
    if HUB_NAME.fullmatch(facts.model_path):
        return Finding(
            level="warning",
            what=f"model {facts.model_path}: no such folder, so it will be fetched from the Hugging Face hub or its cache",
            advice="fetch it before the first start, or give the path of a folder",
        )
    what = f"model {facts.model_path}: no such folder with a config.json"
    return Finding(level="error", what=what, advice="give the path of a model folder")


def _memory_finding(facts: HostFacts, wish: Wish) -> Finding:
    available, n = facts.memory_available_bytes, wish.topology.n_workers
    least = n * CPU_ENGINE_BYTES
    wanted = least + n * KV_SPACE_BYTES if wish.device == "cpu" else least
    what = f"memory: {available / GIB:.1f} GiB available, {n} engines take about {wanted / GIB:.1f}"
    if available < least:
        return Finding(level="error", what=what, advice="end other programs, or take a smaller topology")
    if available < wanted:
        return Finding(level="warning", what=what, advice="it may not last; end other programs")
    return Finding(level="ok", what=what)


def _files_finding(facts: HostFacts) -> Finding:
    what = f"open files: at most {facts.fd_limit} per process"
    if facts.fd_limit >= FEW_FILES:
        return Finding(level="ok", what=what)
    level: Level = "error" if facts.fd_limit < TOO_FEW_FILES else "warning"
    return Finding(
        level=level, what=what, advice="every request under way takes one on each side; run: ulimit -n 65535"
    )


def _gpu_findings(facts: HostFacts, wish: Wish) -> list[Finding]:
    if not facts.gpus:
        advice = "install the NVIDIA driver, or take --device cpu"
        return [Finding(level="error", what="no GPU: nvidia-smi shows none", advice=advice)]
    findings = []
    needed = wish.topology.n_gpus
    if len(facts.gpus) < needed:
        what = f"{len(facts.gpus)} GPUs, and {wish.topology.name} needs {needed}"
        findings.append(Finding(level="error", what=what, advice="take a smaller topology"))
    findings += [_gpu_finding(gpu, wish) for gpu in facts.gpus[:needed]]
    if wish.topology.tensor_parallel_size > 1 and facts.shm_free_bytes is not None and facts.shm_free_bytes < SHM_BYTES:
        what = f"/dev/shm: {facts.shm_free_bytes / GIB:.2f} GiB free, and tensor-parallel workers exchange data there"
        findings.append(Finding(level="warning", what=what, advice="in a container: --shm-size 8g, or --ipc host"))
    return findings


def _gpu_finding(gpu: GpuFact, wish: Wish) -> Finding:
    free = gpu.total_bytes - gpu.used_bytes
    busy = "unknown" if gpu.utilization_ratio is None else f"{gpu.utilization_ratio:.0%}"
    what = f"GPU {gpu.index} ({gpu.name}): {free / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free, utilisation {busy}"
    if free < wish.gpu_memory_utilization_ratio * gpu.total_bytes:
        share = f"{wish.gpu_memory_utilization_ratio:.0%}"
        advice = (
            f"an engine claims {share} of it: end what uses it (nvidia-smi), or lower engine.gpu_memory_utilization"
        )
        return Finding(level="error", what=what, advice=advice)
    if gpu.utilization_ratio:
        return Finding(level="warning", what=what, advice="something computes on it and will disturb the measurement")
    return Finding(level="ok", what=what)


def endpoint_findings(facts: Sequence[EndpointFacts]) -> tuple[Finding, ...]:
    """One finding per engine that already runs: everything that its proofs would lack, with the flags that bring it."""
    return tuple(_endpoint_finding(fact) for fact in facts)


def _endpoint_finding(fact: EndpointFacts) -> Finding:
    where = f"{fact.worker_id} ({fact.url})"
    if fact.problem is not None:
        return Finding(
            level="error", what=fact.problem, advice="start it, or correct its address in the endpoints file"
        )
    lacks = []
    if fact.has_cache_reset is False:
        lacks.append(("no /reset_prefix_cache", "VLLM_SERVER_DEV_MODE=1 in its environment"))
    if fact.has_prompt_token_details is False:
        lacks.append(("no cached tokens in usage", "--enable-prompt-tokens-details"))
    if fact.missing_counters:
        lacks.append(
            (f"no metrics for {', '.join(fact.missing_counters)}", "a newer vLLM, without --disable-log-stats")
        )
    if not lacks:
        return Finding(level="ok", what=f"{where}: generates, resets its cache, reports cached tokens and their source")
    return Finding(
        level="error",
        what=f"{where}: {'; '.join(what for what, _ in lacks)}",
        advice=f"start it with {' and '.join(flag for _, flag in lacks)}",
    )


# -- facts -----------------------------------------------------------------------------------------------------------


def host_facts(
    *, python: Path, model_path: str, ports: Sequence[int], state_folder: Path, install: VllmInstall | None = None
) -> HostFacts:
    """Look at this machine. Takes as long as importing vLLM does, unless the ``install`` is known already."""
    problem = None
    try:
        install = install or inspect_install(python)
    except LaunchError as error:
        problem = str(error)
    return HostFacts(
        fd_limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        memory_available_bytes=memory_available(Path("/proc/meminfo").read_text()),
        shm_free_bytes=_shm_free(),
        gpus=_gpus(),
        ports_taken=tuple(port for port in ports if port_taken(HOST, port)),
        model_path=model_path,
        model_has_config=(Path(model_path) / "config.json").is_file(),
        install=install,
        install_problem=problem,
        orphans=find_orphans(state_folder),
    )


def memory_available(meminfo: str) -> int:
    """Bytes that can be had without swapping, from the text of /proc/meminfo."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _shm_free() -> int | None:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize


def _gpus() -> tuple[GpuFact, ...] | None:
    try:
        answer = subprocess.run(QUERY_GPUS, capture_output=True, text=True, timeout=30.0)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_gpus(answer.stdout) if answer.returncode == 0 else None


def parse_gpus(text: str) -> tuple[GpuFact, ...]:
    """GPUs from the lines of ``QUERY_GPUS``: index, name, MiB total, MiB used, per cent (or ``[N/A]``)."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    return tuple(
        GpuFact(
            index=int(index),
            name=name,
            total_bytes=int(total) * 1024**2,
            used_bytes=int(used) * 1024**2,
            utilization_ratio=int(busy) / 100 if busy.isdecimal() else None,
        )
        for index, name, total, used, busy in rows
    )


async def endpoint_facts(client: httpx.AsyncClient, endpoint: Endpoint) -> EndpointFacts:
    """Ask one running engine. It generates one token and changes nothing."""
    body = {"prompt": list(PROBE_PROMPT), "max_tokens": 1, "temperature": 0}
    try:
        with explain(endpoint, "generate"):
            answer = await client.post(f"{endpoint.url}/v1/completions", json=body)
            answer.raise_for_status()
            details = answer.json()["usage"].get("prompt_tokens_details")
        with explain(endpoint, "read /metrics"):
            counters = read_scrape((await client.get(f"{endpoint.url}/metrics")).text).counters
            # A route that exists only for POST answers GET with 405, and one that does not exist with 404.
            reset = await client.get(f"{endpoint.url}/reset_prefix_cache")
    except NotReady as error:
        return EndpointFacts(worker_id=endpoint.worker_id, url=endpoint.url, problem=str(error))
    sources = [name for name, (metric, _) in COUNTERS.items() if metric == "vllm:prompt_tokens_by_source_total"]
    return EndpointFacts(
        worker_id=endpoint.worker_id,
        url=endpoint.url,
        has_cache_reset=reset.status_code != httpx.codes.NOT_FOUND,
        has_prompt_token_details=details is not None,
        missing_counters=tuple(name for name in sources if getattr(counters, name) is None),
    )
