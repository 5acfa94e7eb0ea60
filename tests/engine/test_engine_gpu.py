"""GPU readings: NVML where it is there, nulls where it is not, per engine and by the GPU ids that it was given."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
from engine_plans import driver_plan

from ppd_bench.core.point import EngineSettings
from ppd_bench.core.topology import parse_topology
from ppd_bench.engine.gpu import NO_GPU, GpuGauges, GpuReader, gpus_of, load_nvml
from ppd_bench.engine.launch_plan import launch_plan, ports_per_engine
from ppd_bench.engine.vllm_install import VllmInstall

GIB = 1024**3


class FakeNvml:
    """GPUs by number: (busy in per cent, bytes used); null is what the driver does not support."""

    class NVMLError(Exception):
        """NVML's error."""

    def __init__(self, *gpus: tuple[int | None, int]) -> None:
        self.gpus = gpus
        self.asked: list[str | int] = []

    def nvmlInit(self) -> None:  # noqa: N802
        """Nothing to do."""

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        self.asked.append(index)
        if index >= len(self.gpus):
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        self.asked.append(uuid)
        return int(uuid[-1])

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        busy = self.gpus[handle][0]
        if busy is None:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=busy, memory=1)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(total=80 * GIB, used=self.gpus[handle][1], free=0)


def reader(nvml: FakeNvml, **gpus: tuple[str, ...]) -> GpuReader:
    return GpuReader(gpus, load=lambda: nvml)


def test_an_engine_on_one_gpu_has_that_gpus_figures() -> None:
    nvml = FakeNvml((50, 10 * GIB), (90, 70 * GIB))
    assert reader(nvml, P0=("0",), D0=("1",)).read("D0") == GpuGauges(
        gpu_ids="1", gpu_utilization_ratio=0.9, gpu_memory_used_bytes=70 * GIB
    )
    assert nvml.asked == [1, 1]


def test_several_gpus_of_one_engine_are_averaged_and_added_up() -> None:
    found = reader(FakeNvml((40, GIB), (0, GIB), (60, 2 * GIB)), D0=("0", "2")).read("D0")
    assert found == GpuGauges(gpu_ids="0,2", gpu_utilization_ratio=0.5, gpu_memory_used_bytes=3 * GIB)


def test_gpus_can_be_named_by_uuid_and_what_nvml_does_not_tell_is_null_not_zero() -> None:
    nvml = FakeNvml((0, 0), (None, GIB))
    assert reader(nvml, D0=("GPU-abc-0",)).read("D0").gpu_utilization_ratio == 0.0
    assert nvml.asked[0] == "GPU-abc-0"
    assert reader(nvml, D0=("1",)).read("D0") == GpuGauges(gpu_ids="1", gpu_memory_used_bytes=GIB)
    assert reader(nvml, D0=("0", "1")).read("D0").gpu_utilization_ratio is None
    assert reader(nvml, D0=("7",)).read("D0") == GpuGauges(gpu_ids="7")


def test_without_gpus_nvml_is_not_even_loaded_and_without_nvml_everything_is_null() -> None:
    def never() -> FakeNvml:
        raise AssertionError("NVML was loaded for engines without GPUs")

    assert GpuReader({}, load=never).read("D0") == NO_GPU
    blind = GpuReader({"D0": ("0",)}, load=lambda: None)
    assert not blind.can_read
    assert blind.read("D0") == NO_GPU


@pytest.mark.skipif(importlib.util.find_spec("pynvml") is not None, reason="nvidia-ml-py is installed here")
def test_a_machine_without_the_package_is_no_error() -> None:
    assert load_nvml() is None


def test_the_gpus_of_a_plan_are_those_that_its_engines_see() -> None:
    install = VllmInstall(
        python="python",
        package="vllm",
        version="0.32.0",
        platform="cuda",
        nixl_version="1.5.1",
        connectors=("NixlConnector",),
    )
    topology = parse_topology("1P_1D@tp2")
    plan = launch_plan(
        topology,
        model_path="m",
        engine=EngineSettings(kv_connector="NixlConnector", handoff="pull_async"),
        install=install,
        device="cuda",
        ports=[8000, 8000 + ports_per_engine(topology)],
        seed=0,
        visible_gpus=("3", "GPU-b", "5", "6"),
    )
    assert gpus_of(plan.commands) == {"P0": ("3", "GPU-b"), "D0": ("5", "6")}
    assert gpus_of(driver_plan("1P_1D").commands) == {}
