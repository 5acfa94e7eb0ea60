"""GPU utilisation and memory by NVML, where there is a GPU and the package nvidia-ml-py; nothing is imported elsewhere."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from ppd_bench.engine.launch_plan import EngineCommand

VISIBLE = "CUDA_VISIBLE_DEVICES"
PACKAGE = "nvidia-ml-py"


class Nvml(Protocol):
    """What is used of the module ``pynvml``. Every function may raise; ``NVMLError`` is its error."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...  # noqa: N802

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any: ...  # noqa: N802

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any: ...  # noqa: N802

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...  # noqa: N802


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuGauges:
    """An engine's GPUs at one instant. ``gpu_ids`` as in CUDA_VISIBLE_DEVICES, comma-separated.

    ``gpu_utilization_ratio``: share of the last sampling period (up to 1 s) in which a kernel ran, the mean over the GPUs.
    ``gpu_memory_used_bytes``: their sum, whoever uses it. Null where NVML does not tell (a MIG slice has no utilisation).
    """

    gpu_ids: str | None = None
    gpu_utilization_ratio: float | None = None
    gpu_memory_used_bytes: float | None = None


NO_GPU = GpuGauges()


def load_nvml() -> Nvml | None:
    """NVML, ready to be asked; null without the package, a driver or a GPU."""
    try:
        nvml = cast(Nvml, importlib.import_module("pynvml"))
        nvml.nvmlInit()
    except Exception:  # a missing package, a missing or mismatched driver library: readings are optional
        return None
    return nvml


def gpus_of(commands: Sequence[EngineCommand]) -> dict[str, tuple[str, ...]]:
    """By worker id, the GPUs that a launched engine sees; engines without any are left out.

    Numbers are taken as NVML's, which follow the bus; CUDA's do too where all GPUs are of one kind, or with
    CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    shown = {command.worker_id: command.env.get(VISIBLE, "") for command in commands}
    return {worker_id: tuple(ids.split(",")) for worker_id, ids in shown.items() if ids}


class GpuReader:
    """Reads the GPUs of engines. Blocking calls of well below a millisecond each; none is made without GPUs."""

    def __init__(self, gpus: Mapping[str, Sequence[str]], load: Callable[[], Nvml | None] = load_nvml) -> None:
        self._gpus = gpus
        self._nvml = load() if gpus else None

    @property
    def can_read(self) -> bool:
        """Whether NVML is there."""
        return self._nvml is not None

    def read(self, worker_id: str) -> GpuGauges:
        """The engine's GPUs now; all null where nothing can be read."""
        gpu_ids = self._gpus.get(worker_id, ())
        if self._nvml is None or not gpu_ids:
            return NO_GPU
        busy = [_asked(self._nvml, _utilization_ratio, gpu_id) for gpu_id in gpu_ids]
        used = [_asked(self._nvml, _memory_used_bytes, gpu_id) for gpu_id in gpu_ids]
        total_busy, total_used = _total(busy), _total(used)
        return GpuGauges(
            gpu_ids=",".join(gpu_ids),
            gpu_utilization_ratio=None if total_busy is None else total_busy / len(gpu_ids),
            gpu_memory_used_bytes=total_used,
        )


def _asked(nvml: Nvml, question: Callable[[Nvml, Any], float], gpu_id: str) -> float | None:
    try:
        by_number = gpu_id.isdecimal()
        handle = nvml.nvmlDeviceGetHandleByIndex(int(gpu_id)) if by_number else nvml.nvmlDeviceGetHandleByUUID(gpu_id)
        return question(nvml, handle)
    except nvml.NVMLError:
        return None


def _utilization_ratio(nvml: Nvml, handle: Any) -> float:
    return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100.0


def _memory_used_bytes(nvml: Nvml, handle: Any) -> float:
    return float(nvml.nvmlDeviceGetMemoryInfo(handle).used)


def _total(values: Sequence[float | None]) -> float | None:
    """The sum; null where one is null."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
