"""From names in a sweep file to values: topologies, workloads, rates, GPU and model profiles.

Functions return what they could resolve and one line per problem, so that one wrong name hides no other. Lists keep
their places: null stands for an entry that could not be resolved.
"""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ppd_bench.core.errors import SpecError
from ppd_bench.core.models import MODELS
from ppd_bench.core.point import content_hash
from ppd_bench.core.profiles import ModelProfile, model_from_hf_config
from ppd_bench.core.topology import GRAMMAR_HINT, Topology, parse_topology
from ppd_bench.core.workload import WorkloadSpec
from ppd_bench.sweep.keys import SweepKeys
from ppd_bench.workload.library import find_workload
from ppd_bench.workload.strict_model import Origin, model_keys
from ppd_bench.workload.strict_yaml import Loc

T = TypeVar("T")
Resolved = tuple[list[T | None], list[str]]


def resolve_list(
    value: object,
    key: str,
    origin: Origin,
    *,
    one: Callable[[object], T],
    identity: Callable[[T], Hashable],
    paper: Sequence[str] = (),
) -> Resolved[T]:
    """Resolve each entry of ``value`` (``"paper"`` stands for ``paper``) with ``one``, which raises SpecError."""
    if value is None:
        return [], []
    allowed = str(model_keys(SweepKeys)[key].description)
    entries = list(paper) if value == "paper" and paper else value
    if not isinstance(entries, list | tuple) or not entries:
        return [], [origin.line((key,), f"must be a list with at least one entry, got {reprlib.repr(value)}", allowed)]
    found: list[T | None] = []
    problems: list[str] = []
    first_index: dict[Hashable, int] = {}
    for index, entry in enumerate(entries):
        item, wrong = _attempt(one, entry)
        if item is not None:
            first = first_index.setdefault(identity(item), index)
            if first != index:
                wrong = [f"{reprlib.repr(entry)} is already listed as {key}[{first}]; allowed: each once"]
        found.append(item)
        tell = _dataset_problem if isinstance(entry, Mapping) else _located
        problems += [tell(problem, origin, (key, index), allowed) for problem in wrong]
    return found, problems


def _dataset_problem(problem: str, origin: Origin, loc: Loc, allowed: str) -> str:
    """Recorded traffic says itself what is wrong with it and what to do; on the command line it has an argument of its own."""
    where = "command line" if loc[:1] in origin.overridden else origin.place(loc)
    return f"{where}: {problem}"


def topology_of(entry: object) -> Topology:
    """Parse one entry of ``topologies``."""
    if not isinstance(entry, str):
        raise SpecError(f"must be a topology name, got {reprlib.repr(entry)}; allowed: {GRAMMAR_HINT}")
    return parse_topology(entry)


def workload_of(entry: object) -> WorkloadSpec:
    """Load one entry of ``workloads`` that is a name or a path."""
    if not isinstance(entry, str):
        raise SpecError(f"must be a workload name or path, got {reprlib.repr(entry)}")
    return find_workload(entry)


def rate_of(entry: object) -> float:
    """One entry of ``qps``, conversations per second."""
    if isinstance(entry, bool) or not isinstance(entry, int | float) or not 0 < entry < math.inf:
        raise SpecError(f"must be a number above 0, got {reprlib.repr(entry)}")
    return float(entry)


def resolve_name(
    value: str | None, loc: Loc, noun: str, allowed: Collection[str], origin: Origin
) -> tuple[str | None, list[str]]:
    """The name itself where it is allowed."""
    if value is None or value in allowed:
        return value, []
    return None, [origin.unknown(loc, noun, value, allowed)]


def resolve_model(value: str | None, origin: Origin) -> tuple[ModelProfile | None, list[str]]:
    """A model profile by name, or from the path of a Hugging Face config.json (or of its folder)."""
    if value is None or value in MODELS:
        return (None if value is None else MODELS[value]), []
    if "/" not in value and not value.endswith(".json"):
        return None, [origin.unknown(("model",), "model", value, tuple(MODELS))]
    profile, wrong = _attempt(_model_from_file, Path(value))
    allowed = f"{', '.join(MODELS)}, or the path of a config.json"
    return profile, [_located(problem, origin, ("model",), allowed) for problem in wrong]


def _attempt(one: Callable[..., T], entry: object) -> tuple[T | None, list[str]]:
    try:
        return one(entry), []
    except SpecError as error:
        return None, list(error.problems)


def _located(problem: str, origin: Origin, loc: Loc, allowed: str) -> str:
    line = f"{origin.place(loc)}: {problem}"
    return line if "allowed: " in problem else f"{line}; allowed: {allowed}"


def _model_from_file(path: Path) -> ModelProfile:
    """The name carries a hash of the profile: a point's identity must follow what the file says, not where it lies."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{file} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise SpecError(f"{file} is not JSON ({error})") from error
    if not isinstance(config, Mapping):
        raise SpecError(f"{file} holds no JSON object")
    stem = file.resolve().parent.name if file.name == "config.json" else file.stem
    profile = model_from_hf_config(stem, config)
    return dataclasses.replace(profile, name=f"{stem}-{content_hash(dataclasses.asdict(profile))[:8]}")
