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


def choose_executor(
    asked: str, *, engines_given: bool = False, gpus: Callable[[], tuple[str, ...]] = visible_gpus
) -> Choice:
    """``auto`` means live where GPUs are visible or engines were given (``--device cpu``, ``--endpoints``), else simulated.

    Raises:
        LaunchError: live is asked for, and there is neither a GPU nor engines.
    """
    if asked == "sim":
        return Choice(executor=Executor.SIM, reason="asked for")
    if engines_given:
        return Choice(executor=Executor.LIVE, reason="engines were given on the command line")
    found = gpus()
    if found:
        return Choice(executor=Executor.LIVE, reason=f"{len(found)} GPU(s) are visible")
    if asked == "live":
        raise LaunchError(
            "executor 'live' was asked for, but no GPU is visible: give --device cpu (paths, not speed), --endpoints FILE "
            "for engines that run elsewhere, or --executor sim to plan without engines"
        )
    return Choice(executor=Executor.SIM, reason="no GPU is visible")
