"""PEP 517 backend: setuptools, plus hot modules compiled with mypyc where that works.

Compiling happens in a child process into a temporary folder, and what comes out is
imported there once.  Whatever goes wrong (no compiler, no Python.h, a type error, a
crash, a time-out), the modules are installed as plain Python and a warning tells why.

PPD_BENCH_PURE=1      never compile
PPD_BENCH_COMPILE=1   compile for `pip install -e .` too (by default that one stays
                      interpreted: a .so beside an edited .py would hide the edit)
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from setuptools import Extension
from setuptools import build_meta as _setuptools
from setuptools.command.build_ext import build_ext as _build_ext
from setuptools.command.build_py import build_py as _build_py

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = "ppd_bench"
MODULES = [  # compiled as one group: all or none
    "ppd_bench.core.decision",
    "ppd_bench.policy.query",
    "ppd_bench.policy.events",
    "ppd_bench.policy.prefixes",
    "ppd_bench.policy.ledger",
    "ppd_bench.policy.placements",
    "ppd_bench.policy.deciders",
    "ppd_bench.policy.policy",
    "ppd_bench.sim.kv",
    "ppd_bench.sim.cost",
    "ppd_bench.sim.link",
    "ppd_bench.sim.seq",
    "ppd_bench.sim.trip",
    "ppd_bench.sim.worker",
    "ppd_bench.sim.cluster",
    "ppd_bench.sim.rows",
    "ppd_bench.engine.stream",
    "ppd_bench.engine.handoff",
    "ppd_bench.engine.leg_bytes",
    "ppd_bench.engine.exchange",
    "ppd_bench.engine.client",
    "ppd_bench.engine.dispatch",
    "ppd_bench.router.http_request",
    "ppd_bench.router.responder",
    "ppd_bench.router.http_connection",
    "ppd_bench.router.chain",
    "ppd_bench.router.token_model",
    "ppd_bench.router.prompt_size",
    "ppd_bench.router.identity",
    "ppd_bench.router.answer",
    "ppd_bench.router.usage_filter",
    "ppd_bench.router.relay",
    "ppd_bench.router.turn_record",
    "ppd_bench.router.metrics",
    "ppd_bench.router.asked",
    "ppd_bench.router.state",
    "ppd_bench.router.turns",
]
GROUP = "ppd_bench._native"  # the shared library becomes ppd_bench/_native__mypyc*.so
IMPORTED = {"pydantic", "pyyaml", "httpx", "httptools", "orjson", "numpy", "prometheus_client"}
"""Dependencies of the project that these modules import: compiling reads their types, and the trial import needs them."""
BUNDLES = {
    "sweeps": "sweep/library_data",
    "workloads": "workload/library_data",
}  # folders of YAML that the wheel carries
STATUS_FILE = "_build_status.txt"  # read at run time, since pip hides what a build prints
COMPILE_TIMEOUT_S = 900
MYPY = "mypy==2.4.1"
ZIG = "ziglang==0.17.1"
# Where ziglang and mypy's own binary dependency have wheels; elsewhere asking for
# them could fail the install.
WHEEL_PLATFORMS = {
    ("linux", "x86_64"),
    ("linux", "aarch64"),
    ("darwin", "x86_64"),
    ("darwin", "arm64"),
}

# ---------------------------------------------------------------- what to build with


def _flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() not in ("", "0", "no", "false", "off")


def _links(compiler: list[str]) -> bool:
    """Whether the compiler makes a shared library from C that includes Python.h."""
    with tempfile.TemporaryDirectory(prefix="ppd-probe-") as tmp:
        source = Path(tmp, "probe.c")
        source.write_text("#include <Python.h>\nPyObject *probe(void) { return PyLong_FromLong(1); }\n")
        include = {sysconfig.get_path("include"), sysconfig.get_path("platinclude")}
        command = [
            *compiler,
            *COMPILE_FLAGS,
            *(f"-I{path}" for path in include),
            str(source),
            *LINK_FLAGS,
            "-o",
            str(Path(tmp, "probe.so")),
        ]
        try:
            return subprocess.run(command, capture_output=True, timeout=120).returncode == 0
        except (OSError, subprocess.SubprocessError):
            return False


COMPILE_FLAGS = ["-fPIC", "-fwrapv", "-DNDEBUG"]
LINK_FLAGS = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]


def _system_compiler() -> list[str] | None:
    names = [shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]]
    for command in names:
        if command and shutil.which(command[0]) and _links(command):
            return command
    return None


def _zig_compiler() -> list[str] | None:
    if find_spec("ziglang") is None:
        return None
    # baseline: not this very CPU's instructions; no UBSan (zig cc's default in debug).
    return [sys.executable, "-m", "ziglang", "cc", "-mcpu=baseline", "-fno-sanitize=undefined"]


def _why_not() -> str | None:
    """A reason known beforehand for which compiling is not even tried."""
    if _flag("PPD_BENCH_PURE"):
        return "PPD_BENCH_PURE is set"
    if platform.python_implementation() != "CPython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "this is not the usual CPython (with the GIL)"
    if (sys.platform, platform.machine()) not in WHEEL_PLATFORMS:
        return f"not tried on {sys.platform} {platform.machine()}"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python.h (the development files of this Python) is missing"
    return None


def _tools() -> list[str]:
    if _why_not() is not None:
        return []
    return [MYPY, *_imported()] if _system_compiler() else [MYPY, ZIG, *_imported()]


def _imported() -> list[str]:
    """The requirements of pyproject.toml for ``IMPORTED``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [line for line in project["dependencies"] if re.split(r"[^\w.-]", line)[0].lower() in IMPORTED]


# ---------------------------------------------------------------- the child: compile


def _compile(out: Path, work: Path) -> None:
    """Run in a child process: mypyc MODULES to C, C to shared libraries under `out`."""
    from mypyc.build import mypycify
    from setuptools import Distribution

    compiler = _system_compiler() or _zig_compiler()
    if compiler is None:
        sys.exit("no C compiler (cc, gcc, clang or the ziglang package)")
    os.chdir(ROOT)
    os.environ.pop("MYPYPATH", None)
    extensions = mypycify(
        [
            "--config-file=",
            f"--cache-dir={work / 'mypy'}",
            "--follow-imports=silent",
            "--ignore-missing-imports",
            *(name.replace(".", "/") + ".py" for name in MODULES),
        ],
        opt_level="3",
        debug_level="0",
        target_dir=str(work / "c"),
        group_name=GROUP,
    )
    for extension in extensions:  # a compiler newer than this mypyc may warn of new things
        extension.extra_compile_args = [a for a in extension.extra_compile_args if a != "-Werror"] + ["-w"]

    class BuildExt(_build_ext):
        def build_extensions(self) -> None:
            self.compiler.set_executables(
                compiler=[*compiler, *COMPILE_FLAGS],
                compiler_so=[*compiler, *COMPILE_FLAGS],
                linker_so=[*compiler, *LINK_FLAGS],
            )
            super().build_extensions()

    distribution = Distribution({"name": PACKAGE, "ext_modules": extensions})
    command = BuildExt(distribution)
    command.build_lib, command.build_temp, command.parallel = str(out), str(work / "o"), None
    command.ensure_finalized()
    command.run()
    print("compiler:", shlex.join(compiler))


_SMOKE = """
import importlib, sys
for name in sys.argv[1:]:
    file = importlib.import_module(name).__file__
    assert not file.endswith('.py'), file
"""


def _attempt(tmp: Path) -> tuple[Path | None, str]:
    """The folder with the shared libraries, or None; and how it went, in one line."""
    reason = _why_not()
    if reason is not None:
        return None, reason
    if find_spec("mypyc") is None:
        return None, "mypy is not there (install it first with --no-build-isolation)"
    out, work, trial = tmp / "lib", tmp / "work", tmp / "trial"
    work.mkdir()
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(tmp / "zig"), "ZIG_LOCAL_CACHE_DIR": str(tmp / "zig")}
    try:
        child = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), str(out), str(work)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=COMPILE_TIMEOUT_S,
        )
        print(child.stdout, flush=True)
        lines = child.stdout.strip().splitlines() or ["no output"]
        if child.returncode != 0:
            return None, f"compiling failed ({child.returncode}): {lines[-1]}"
        # Import once what was made, beside a copy of the sources.
        ignore = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / PACKAGE, trial / PACKAGE, ignore=ignore)
        shutil.copytree(out, trial, dirs_exist_ok=True)
        smoke = subprocess.run(
            [sys.executable, "-c", _SMOKE, *MODULES],
            cwd=trial,
            stdin=subprocess.DEVNULL,
            env={**environment, "PYTHONPATH": os.pathsep.join([str(trial), environment.get("PYTHONPATH", "")])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=120,
        )
        if smoke.returncode != 0:
            print(smoke.stdout, flush=True)
            return None, f"compiled, but importing it failed: {(smoke.stdout.strip().splitlines() or ['?'])[-1]}"
    except (OSError, subprocess.SubprocessError, shutil.Error) as error:
        return None, f"compiling failed: {type(error).__name__}: {error}"
    return out, f"compiled with {'ziglang' if 'ziglang' in lines[-1] else lines[-1].removeprefix('compiler: ')}"


# ---------------------------------------------------------------- setup()'s arguments

_libraries: Path | None = None  # where the finished shared libraries lie, for setup.py
_status = "interpreted: built without the build backend"
_build_base: str | None = None


class CopyExtensions(_build_ext):
    """The shared libraries are finished already: put each where setuptools wants it."""

    def run(self) -> None:  # setuptools' run, without looking for a compiler
        if self.inplace:
            self.inplace, inplace = 0, True
        else:
            inplace = False
        self.build_extensions()
        self.inplace = int(inplace)
        if inplace:
            self.copy_extensions_to_source()

    def build_extensions(self) -> None:
        assert _libraries is not None
        for extension in self.extensions:
            target = Path(self.get_ext_fullpath(extension.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(_libraries / self.get_ext_filename(extension.name), target)


class BuildPy(_build_py):
    """Bundle sweeps and workloads, and leave word of whether, or why not, the hot modules were compiled."""

    def run(self) -> None:
        super().run()
        if not getattr(self, "editable_mode", False):
            target = Path(self.build_lib, PACKAGE, STATUS_FILE)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_status + "\n", encoding="utf-8")
            self._bundle()

    def _bundle(self) -> None:
        for folder, target in BUNDLES.items():
            into = Path(self.build_lib, PACKAGE, target)
            into.mkdir(parents=True, exist_ok=True)
            for file in sorted((ROOT / folder).glob("*.yaml")):
                shutil.copy2(file, into / file.name)


def setup_arguments() -> dict[str, Any]:
    arguments: dict[str, Any] = {"cmdclass": {"build_py": BuildPy}}
    if _build_base is not None:  # not ./build, where an older build's files would linger
        arguments["options"] = {"build": {"build_base": _build_base}}
    if _libraries is not None:
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        names = [
            str(path.relative_to(_libraries)).removesuffix(suffix).replace(os.sep, ".")
            for path in sorted(_libraries.rglob("*" + suffix))
        ]
        arguments["ext_modules"] = [Extension(name, []) for name in names]
        arguments["cmdclass"]["build_ext"] = CopyExtensions
    return arguments


@contextlib.contextmanager
def _prepared(compile_it: bool) -> Iterator[None]:
    global _libraries, _status, _build_base
    with tempfile.TemporaryDirectory(prefix="ppd-build-", ignore_cleanup_errors=True) as tmp:
        if compile_it:
            _libraries, _status = _attempt(Path(tmp))
            if _libraries is None:
                _status = f"interpreted: {_status}"
                print(
                    f"\nWARNING: {PACKAGE}: hot modules stay {_status}\n"
                    "WARNING: everything works, but simulations run several times slower, and the router costs more.\n",
                    file=sys.stderr,
                    flush=True,
                )
        _build_base = str(Path(tmp, "build"))
        try:
            yield
        finally:
            _libraries, _build_base = None, None


# ---------------------------------------------------------------- the PEP 517/660 hooks


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [*_setuptools.get_requires_for_build_wheel(config_settings), *_tools()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    tools = _tools() if _flag("PPD_BENCH_COMPILE") else []
    return [*_setuptools.get_requires_for_build_editable(config_settings), *tools]


get_requires_for_build_sdist = _setuptools.get_requires_for_build_sdist
prepare_metadata_for_build_wheel = _setuptools.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = _setuptools.prepare_metadata_for_build_editable
build_sdist = _setuptools.build_sdist


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: Any = None) -> str:
    with _prepared(compile_it=True):
        return _setuptools.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: Any = None) -> str:
    for name in [*MODULES, GROUP + "__mypyc"]:  # an older in-place build would hide the sources
        path = ROOT / name.replace(".", "/")
        for stale in path.parent.glob(path.name + ".*.so"):
            stale.unlink()
    with _prepared(compile_it=_flag("PPD_BENCH_COMPILE")):
        return _setuptools.build_editable(wheel_directory, config_settings, metadata_directory)


if __name__ == "__main__":
    _compile(Path(sys.argv[1]), Path(sys.argv[2]))
