"""Which executor runs a sweep here."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from ppd_bench.core.enums import Executor
from ppd_bench.core.errors import LaunchError

NVIDIA_SMI_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The executor and why, for the first line of output."""

    executor: Executor
    reason: str


def visible_gpus() -> tuple[str, ...]:
    """One line per GPU that the driver shows; empty without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return (
        tuple(line for line in listed.stdout.splitlines() if line.startswith("GPU ")) if not listed.returncode else ()
    )


def choose_executor(asked: str, gpus: Callable[[], tuple[str, ...]] = visible_gpus) -> Choice:
    """``auto`` means live where GPUs are visible, else simulated.

    Raises:
        LaunchError: live is asked for, or follows from visible GPUs, and cannot run.
    """
    if asked == "sim":
        return Choice(executor=Executor.SIM, reason="asked for")
    found = gpus()
    if asked == "auto" and not found:
        return Choice(executor=Executor.SIM, reason="no GPU is visible")
    why = (
        f"executor 'auto' means live here, since {len(found)} GPU(s) are visible"
        if found
        else "executor 'live' was asked for"
    )
    raise LaunchError(
        f"{why}, but this version of ppd-bench cannot launch vLLM engines yet; "
        "give --executor sim to run the same sweep on the simulator"
    )
