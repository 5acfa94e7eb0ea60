"""What to start for a layout: one command per engine. Pure: the same arguments give the same commands.

D and pD are one process, so a plan is made for ``topology.layout`` and serves every topology of that layout.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from ppd_bench.core.enums import Role
from ppd_bench.core.errors import LaunchError
from ppd_bench.core.point import EngineSettings
from ppd_bench.core.topology import Topology, Worker
from ppd_bench.engine.endpoints import Endpoint
from ppd_bench.engine.vllm_install import VllmInstall

Device = Literal["cuda", "cpu"]

HOST = "127.0.0.1"
ALL_ROLES = "*"
KV_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}

COMMON_ENV = {
    "VLLM_SERVER_DEV_MODE": "1",  # cache resets between points
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}

CPU_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else the CPU platform turns the uni executor into mp
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "0",
    "HF_HUB_OFFLINE": "1",
    "UCX_TLS": "tcp,self",  # with UCX's defaults single transfers between CPU engines took up to 23 s
}

CPU_FLAGS = ("--distributed-executor-backend", "uni", "--enforce-eager", "--dtype", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCommand:
    """One engine to start. ``role`` is the process' (R, P or D); ``env`` comes on top of the caller's environment.

    ``side_channel_port`` is where the KV connector meets its peers, null for an engine without one.
    """

    worker_id: str
    role: Role
    argv: tuple[str, ...]
    env: Mapping[str, str]
    host: str
    port: int
    side_channel_port: int | None
    gpu_ids: tuple[int, ...]

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(worker_id=self.worker_id, role=self.role, host=self.host, port=self.port)

    def shell_line(self) -> str:
        """The command as one line for a shell, variables first."""
        return shlex.join(["env", *(f"{name}={value}" for name, value in self.env.items()), *self.argv])


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """The engines of a layout, in the order of ``layout.workers``. ``connector`` is null without P and D.

    ``engine`` are the settings that the commands were made from.
    """

    layout: str
    model: str
    device: Device
    connector: str | None
    engine: EngineSettings
    commands: tuple[EngineCommand, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    model_path: str
    engine: EngineSettings
    install: VllmInstall
    device: Device
    tensor_parallel_size: int
    seed: int
    extra_flags: Mapping[str, Sequence[str]]
    visible_gpus: Sequence[str]


def ports_per_engine(topology: Topology) -> int:
    """Consecutive ports that each engine needs: HTTP, then one side channel per GPU (old versions listen on each)."""
    return 1 + topology.tensor_parallel_size


def launch_plan(
    topology: Topology,
    *,
    model_path: str,
    engine: EngineSettings,
    install: VllmInstall,
    device: Device,
    ports: Sequence[int],
    seed: int,
    extra_flags: Mapping[str, Sequence[str]] = MappingProxyType({}),
    visible_gpus: Sequence[str] = (),
) -> LaunchPlan:
    """The commands for a topology's layout.

    Args:
        model_path: a folder, or on GPUs also a Hugging Face name; requests call the model by it.
        ports: one per engine, each the first of ``ports_per_engine`` free ones.
        extra_flags: flags by process role (R, P, D, or ``*`` for all), added last, so that they win.
        visible_gpus: the CUDA_VISIBLE_DEVICES of this process, entry by entry; empty means all GPUs by number.

    Raises:
        LaunchError: everything that this vLLM or this device cannot do, one line each.
    """
    layout = topology.layout
    launch = _Launch(
        model_path=model_path,
        engine=engine,
        install=install,
        device=device,
        tensor_parallel_size=layout.tensor_parallel_size,
        seed=seed,
        extra_flags=extra_flags,
        visible_gpus=visible_gpus,
    )
    problems = _problems(layout, launch, ports)
    if problems:
        raise LaunchError("\n".join(problems))
    return LaunchPlan(
        layout=layout.name,
        model=model_path,
        device=device,
        connector=engine.kv_connector if layout.n_prefill else None,
        engine=engine,
        commands=tuple(_command(worker, port, launch) for worker, port in zip(layout.workers, ports, strict=True)),
    )


def plan_text(plan: LaunchPlan) -> str:
    """The plan for people: comments, and commands that a shell runs as they are."""
    connector = f", KV by {plan.connector}" if plan.connector else ""
    return "\n\n".join(
        [
            f"# {plan.layout} on {plan.device}, {len(plan.commands)} engines{connector}",
            *map(_command_text, plan.commands),
        ]
    )


def _command_text(command: EngineCommand) -> str:
    gpus = f", GPU {','.join(map(str, command.gpu_ids))}" if "CUDA_VISIBLE_DEVICES" in command.env else ""
    side = f", side channel {command.side_channel_port}" if command.side_channel_port else ""
    lines = [f"{name}={shlex.quote(value)}" for name, value in command.env.items()]
    program, *words = command.argv
    line = shlex.quote(program)
    for word in words:
        if word.startswith("--"):
            lines.append(line)
            line = f"  {word}"
        else:
            line += f" {shlex.quote(word)}"
    return f"# {command.worker_id}: port {command.port}{side}{gpus}\n" + " \\\n".join([*lines, line])


def _problems(layout: Topology, launch: _Launch, ports: Sequence[int]) -> list[str]:
    lines = []
    if layout.n_prefill:
        lines += _connector_problems(launch)
    if launch.device == "cpu" and layout.tensor_parallel_size > 1:
        lines.append(
            f"topology {layout.name!r} needs GPUs: CPU engines have no tensor parallelism; take one without @tp"
        )
    if launch.install.platform not in (None, launch.device):
        lines.append(
            f"{launch.install.python} has {launch.install.package} {launch.install.version} for "
            f"{launch.install.platform}, and --device is {launch.device}; give another --engine-python or --device"
        )
    if launch.visible_gpus and len(launch.visible_gpus) < layout.n_gpus:
        lines.append(
            f"topology {layout.name!r} needs {layout.n_gpus} GPUs, and CUDA_VISIBLE_DEVICES shows "
            f"{len(launch.visible_gpus)}; show more, or take a smaller topology"
        )
    unknown = sorted(set(launch.extra_flags) - {ALL_ROLES, Role.REPLICA, Role.PREFILL, Role.DECODE})
    if unknown:
        lines.append(f"extra flags are given for {', '.join(unknown)}; allowed: R, P, D and {ALL_ROLES} for all")
    if len(ports) != layout.n_workers:
        lines.append(f"{len(ports)} ports for {layout.n_workers} engines of {layout.name}; give one per engine")
    return lines


def _connector_problems(launch: _Launch) -> list[str]:
    name, install = launch.engine.kv_connector, launch.install
    has = f"{install.package} {install.version}"
    usable = [known for known in CONNECTORS if known in install.connectors]
    if name not in install.connectors:
        return [
            f"engine.kv_connector {name!r} is not in {has} (it has {', '.join(install.connectors) or 'none'}); "
            f"set engine.kv_connector to {' or '.join(usable) or 'another connector, with another vLLM'}"
        ]
    if name not in CONNECTORS:
        return [
            f"engine.kv_connector {name!r} is in {has}, but ppd-bench only launches {', '.join(CONNECTORS)}; set one"
        ]
    library, version = {
        "NixlConnector": ("nixl", install.nixl_version),
        "MooncakeConnector": ("mooncake-transfer-engine", install.mooncake_version),
    }[name]
    if version is None:
        return [f"engine.kv_connector {name!r} needs {library}; run: {install.python} -m pip install {library}"]
    return []


def _command(worker: Worker, port: int, launch: _Launch) -> EngineCommand:
    env, flags = dict(COMMON_ENV), [*_flags(worker, port, launch)]
    side_channel_port = None
    if launch.device == "cpu":
        env |= CPU_ENV
        flags += CPU_FLAGS
    else:
        shown = launch.visible_gpus or [str(gpu) for gpu in range(max(worker.gpu_ids) + 1)]
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order of nvidia-smi and NVML, by which GPUs are checked and read
        env["CUDA_VISIBLE_DEVICES"] = ",".join(shown[gpu] for gpu in worker.gpu_ids)
    if worker.role in KV_ROLES:
        config, kv_env, side_channel_port = CONNECTORS[launch.engine.kv_connector](worker.role, port + 1, launch)
        env |= kv_env
        flags += ["--kv-transfer-config", json.dumps(config, separators=(",", ":"))]
    flags += [*launch.extra_flags.get(ALL_ROLES, ()), *launch.extra_flags.get(worker.role, ())]
    return EngineCommand(
        worker_id=worker.worker_id,
        role=worker.role,
        argv=(*_program(launch), *flags),
        env=env,
        host=HOST,
        port=port,
        side_channel_port=side_channel_port,
        gpu_ids=worker.gpu_ids,
    )


def _program(launch: _Launch) -> tuple[str, ...]:
    if launch.install.script is not None:
        return (launch.install.script, "serve", launch.model_path)
    return (launch.install.python, "-m", "vllm.entrypoints.openai.api_server", "--model", launch.model_path)


def _flags(worker: Worker, port: int, launch: _Launch) -> list[str]:
    engine = launch.engine
    memory = ["--gpu-memory-utilization", f"{engine.gpu_memory_utilization_ratio:g}"]
    return [
        *("--host", HOST, "--port", str(port)),
        *("--tensor-parallel-size", str(launch.tensor_parallel_size)),
        *("--seed", str(launch.seed)),
        *("--max-model-len", str(engine.max_model_len)),
        *("--max-num-batched-tokens", str(engine.max_num_batched_tokens)),
        *("--max-num-seqs", str(engine.max_num_seqs)),
        *("--block-size", str(engine.block_size)),
        *(memory if launch.device == "cuda" else ()),
        "--enable-prefix-caching" if engine.prefix_caching else "--no-enable-prefix-caching",
        "--enable-prompt-tokens-details",
    ]


def _nixl(role: Role, side_channel_port: int, launch: _Launch) -> tuple[dict[str, Any], dict[str, str], int | None]:
    """Both sides listen on a side channel, where the other learns its memory layout."""
    extra: dict[str, Any] = {"kv_lease_duration": math.ceil(launch.engine.kv_lease_s)}
    config: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": KV_ROLES[role]}
    if launch.device == "cpu":
        config["kv_buffer_device"] = "cpu"
        extra = {"num_threads": 0, **extra}
    env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port)}
    return {**config, "kv_connector_extra_config": extra}, env, side_channel_port


def _mooncake(role: Role, side_channel_port: int, launch: _Launch) -> tuple[dict[str, Any], dict[str, str], int | None]:
    """Only P runs a bootstrap server; D learns its address with each request."""
    config: dict[str, Any] = {"kv_connector": "MooncakeConnector", "kv_role": KV_ROLES[role]}
    if launch.device == "cpu":
        config["kv_buffer_device"] = "cpu"
    env = {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(math.ceil(launch.engine.kv_lease_s))}
    if role is not Role.PREFILL:
        return config, env, None
    return config, {**env, "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(side_channel_port)}, side_channel_port


CONNECTORS: dict[str, Callable[[Role, int, _Launch], tuple[dict[str, Any], dict[str, str], int | None]]] = {
    "NixlConnector": _nixl,
    "MooncakeConnector": _mooncake,
}
"""Connectors that can be launched: (role, side channel port, launch) to its configuration, variables and the port it uses."""
