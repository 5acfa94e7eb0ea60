"""The vLLM behind an engine interpreter: asked once, before anything starts, and recorded with the results."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppd_bench.core.errors import LaunchError

OLDEST_VERSION = (0, 11)
"""The first vLLM whose hand-off, metrics and cache reset have the names used here."""

TIME_LIMIT_S = 180.0
"""Importing vLLM and torch from a cold disk takes tens of seconds."""

MARK = "ppd-bench-install:"

INSPECTION = """
import importlib.metadata as metadata, json, sys

def version(*names):
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass

package = next(iter(metadata.packages_distributions().get("vllm", ())), None)
facts = {"package": package, "version": package and metadata.version(package), "connectors": [], "problem": None}
facts["nixl_version"] = version("nixl", "nixl-cu12", "nixl-cu13")
facts["mooncake_version"] = version("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
facts["platform"] = None
try:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.platforms import current_platform
    facts["connectors"] = sorted(KVConnectorFactory._registry)
    facts["platform"] = current_platform.device_type or None
except Exception as error:
    facts["problem"] = f"{type(error).__name__}: {error}"
print("MARK" + json.dumps(facts), flush=True)
""".replace("MARK", MARK)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmInstall:
    """What an interpreter offers. ``package`` is the distribution that provides the module vllm.

    ``platform`` is vLLM's device type here (cuda, cpu ...), null where it finds none. ``script`` is the path of the
    ``vllm`` command beside the interpreter, null where it is absent or would not start: it asks for a distribution
    named vllm.
    """

    python: str
    version: str
    package: str
    connectors: tuple[str, ...]
    nixl_version: str | None = None
    mooncake_version: str | None = None
    platform: str | None = None
    script: str | None = None


def inspect_install(python: Path, *, time_limit_s: float = TIME_LIMIT_S) -> VllmInstall:
    """Run the interpreter once and ask it.

    Raises:
        LaunchError: no such interpreter, vllm missing, not importable or too old, or no answer in time.
    """
    facts = _facts(python, time_limit_s)
    package, version = facts["package"], facts["version"]
    if package is None:
        raise LaunchError(
            f"{python} has no vllm; install it there ({python} -m pip install vllm nixl) or give another --engine-python"
        )
    if _release(version) < OLDEST_VERSION:
        oldest = ".".join(map(str, OLDEST_VERSION))
        raise LaunchError(f"{python} has {package} {version}, and {oldest} or newer is needed; upgrade it there")
    if facts["problem"] is not None:
        raise LaunchError(f"{python} has {package} {version}, but it cannot be imported: {facts['problem']}; repair it")
    script = python.parent / "vllm"
    return VllmInstall(
        python=str(python),
        version=version,
        package=package,
        connectors=tuple(facts["connectors"]),
        nixl_version=facts["nixl_version"],
        mooncake_version=facts["mooncake_version"],
        platform=facts["platform"],
        script=str(script) if package == "vllm" and script.exists() else None,
    )


def _facts(python: Path, time_limit_s: float) -> dict[str, Any]:
    try:
        answer = subprocess.run(
            [str(python), "-c", INSPECTION],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=time_limit_s,
        )
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"{python} did not import vllm within {time_limit_s:g} s; try '{python} -c \"import vllm\"' by hand"
        ) from error
    except OSError as error:
        raise LaunchError(
            f"{python} cannot be run ({error.strerror}); --engine-python must be the path of a Python that has vllm"
        ) from error
    marked = [line for line in answer.stdout.splitlines() if line.startswith(MARK)]
    if not marked:
        last = (answer.stderr.strip().splitlines() or ["no output"])[-1]
        raise LaunchError(
            f"{python} ended with status {answer.returncode} when asked for its vllm ({last}); "
            f"try '{python} -c \"import vllm\"' by hand"
        )
    facts: dict[str, Any] = json.loads(marked[-1].removeprefix(MARK))
    return facts


def _release(version: str) -> tuple[int, int]:
    """Major and minor; a version that follows no scheme (a build from source) is taken for new."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else OLDEST_VERSION
