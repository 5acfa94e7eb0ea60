"""A sweep file with the command line's overrides, checked in one pass and frozen."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from ppd_bench.core.errors import SpecError
from ppd_bench.core.hardware import HARDWARE
from ppd_bench.core.point import EngineSettings, PlacementSpec, PolicySpec, SimSettings, canonical_json
from ppd_bench.core.profiles import ModelProfile
from ppd_bench.core.slo import SLO
from ppd_bench.core.topology import PAPER_TOPOLOGIES, Topology
from ppd_bench.core.workload import WorkloadSpec
from ppd_bench.sweep.checks import Finding, engine_findings, topology_findings
from ppd_bench.sweep.datasets import OpenDataset, keys_of
from ppd_bench.sweep.keys import REQUIRED, PlacementKeys, PolicyKeys, SweepKeys
from ppd_bench.sweep.names import rate_of, resolve_list, resolve_model, resolve_name, topology_of, workload_of
from ppd_bench.sweep.routing import Known, placement_of, policy_of
from ppd_bench.sweep.simulator import profile_findings, simulator_of
from ppd_bench.workload.library import PAPER_WORKLOADS
from ppd_bench.workload.strict_model import Origin, StrictKeys, model_keys, problems_of, without_bad_keys
from ppd_bench.workload.strict_yaml import Loc, read_mapping
from ppd_bench.workload.traffic import SourceFile

T = TypeVar("T")

FLAGS: dict[Loc, str] = {("policy", "decider"): "policy"}
"""Command-line options that are not called as their keys are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    """A sweep, complete and valid: names are resolved, units are seconds, bytes and bytes per second.

    ``executor`` is what was asked for (auto, sim or live); the runner decides what auto means here. ``model`` is the
    profile's name, which is a point's ``model``. ``sources`` are the files of recorded traffic among the workloads.
    """

    name: str
    description: str
    n_gpus: int
    gpu: str
    model: str
    model_profile: ModelProfile
    topologies: tuple[str, ...]
    workloads: tuple[WorkloadSpec, ...]
    qps: tuple[float, ...]
    duration_s: float
    timeout_s: float
    think_time_s: float
    seed: int
    n_repeats: int
    executor: str
    policy: PolicySpec
    placement: PlacementSpec
    engine: EngineSettings
    sim: SimSettings
    slo: SLO
    success_bound_ratio: float
    token_gaps: bool
    sources: tuple[SourceFile, ...] = ()

    def effective(self) -> dict[str, Any]:
        """Everything above as plain JSON values, for a manifest: equal sweeps give equal content."""
        content: dict[str, Any] = json.loads(canonical_json(dataclasses.asdict(self)))
        return content


def load_sweep(
    text: str,
    *,
    file: str,
    deciders: Collection[str],
    placements: Collection[str],
    parameters: Mapping[str, Collection[str]] | None = None,
    overrides: Mapping[str, Any] | None = None,
    open_dataset: OpenDataset | None = None,
) -> SweepSpec:
    """Parse and check a sweep.

    Args:
        text: YAML, see sweeps/all-keys.yaml.
        file: how messages name it.
        deciders, placements: the names that exist.
        parameters: the parameter names of deciders and placements, by name; null leaves parameters unchecked.
        overrides: values from the command line by key, nested for sections; null means not given. They are merged key
            by key, except that a decider brings its own parameters and drops the file's.
        open_dataset: reads recorded traffic among the workloads; null refuses it.

    Raises:
        SpecError: every problem of the file and of the overrides, one line each.
    """
    data, lines = read_mapping(text, file=file)
    merged, overridden = _merge(data, overrides or {})
    problems = _Problems(origin=Origin(file=file, overridden=overridden, flags=FLAGS), lines=lines)
    keys = _validate(merged, problems)
    known = Known(deciders=deciders, placements=placements, parameters=parameters)
    parts = _resolve(keys, problems, known, open_dataset)
    if problems.lines:
        raise SpecError(problems.lines)
    return _assemble(keys, parts)


@dataclass(slots=True, kw_only=True)
class _Problems:
    """What is wrong so far. ``bad`` are the places whose own value is wrong: nothing more is said about those."""

    origin: Origin
    lines: list[str]
    bad: set[Loc] = field(default_factory=set)

    def take(self, result: tuple[T, list[str]]) -> T:
        """Keep the problems of a result and pass its value on."""
        self.lines += result[1]
        return result[0]

    def add(self, findings: Iterable[Finding]) -> None:
        """Keep findings about values that are right in themselves."""
        self.lines += [
            self.origin.line(loc, what, allowed)
            for loc, what, allowed in findings
            if not any(loc[:n] in self.bad for n in range(1, len(loc) + 1))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    model: ModelProfile | None
    topologies: list[Topology | None]
    workloads: list[WorkloadSpec | None]
    qps: list[float | None]
    policy: PolicySpec
    placement: PlacementSpec
    engine: EngineSettings
    sim: SimSettings
    sources: tuple[SourceFile, ...]


def _merge(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[Loc]]:
    merged = dict(data)
    overridden: set[Loc] = set()
    for key, value in overrides.items():
        if isinstance(value, Mapping):
            given = {name: item for name, item in value.items() if item is not None}
            kept = {} if key == "policy" and "decider" in given else merged.get(key) or {}
            if given and isinstance(kept, Mapping):
                merged[key] = {**kept, **given}
                overridden |= {(key, name) for name in given}
        elif value is not None:
            merged[key] = value
            overridden.add((key,))
    return merged, frozenset(overridden)


def _validate(data: Mapping[str, Any], problems: _Problems) -> SweepKeys:
    """The keys, without those that are wrong in themselves."""
    try:
        keys = SweepKeys.model_validate(data)
    except ValidationError as error:
        problems.lines += problems_of(error, SweepKeys, problems.origin)
        problems.bad |= {details["loc"] for details in error.errors(include_url=False)}
        keys = SweepKeys.model_validate(without_bad_keys(data, error))
    known = model_keys(SweepKeys)
    missing = [key for key in REQUIRED if getattr(keys, key) is None]
    problems.add(((key,), "is missing", str(known[key].description)) for key in missing)
    return keys


def _resolve(keys: SweepKeys, problems: _Problems, known: Known, open_dataset: OpenDataset | None) -> _Parts:
    take, origin = problems.take, problems.origin
    engine = EngineSettings(**_given(keys.engine))
    sources: list[SourceFile] = []

    def one_workload(entry: object) -> WorkloadSpec:
        if open_dataset is None or not isinstance(entry, Mapping):
            return workload_of(entry)
        workload, source = open_dataset(keys_of(entry, engine.max_model_len))
        sources.append(source)
        return workload

    take(resolve_name(keys.gpu, ("gpu",), "gpu", tuple(HARDWARE), origin))
    sim, profile = take(simulator_of(keys.simulator, origin))
    parts = _Parts(
        model=take(resolve_model(keys.model, origin)),
        topologies=take(
            resolve_list(keys.topologies, "topologies", origin, one=topology_of, identity=_name, paper=PAPER_TOPOLOGIES)
        ),
        workloads=take(
            resolve_list(keys.workloads, "workloads", origin, one=one_workload, identity=_name, paper=PAPER_WORKLOADS)
        ),
        qps=take(resolve_list(keys.qps, "qps", origin, one=rate_of, identity=float)),
        policy=take(policy_of(keys.policy or PolicyKeys(), known, origin)),
        placement=take(placement_of(keys.placement or PlacementKeys(), known, origin)),
        engine=engine,
        sim=sim,
        sources=tuple(sources),
    )
    problems.add(topology_findings(parts.topologies, keys.gpus, parts.model))
    problems.add(engine_findings(parts.engine, parts.workloads, parts.model))
    problems.add(
        profile_findings(profile, gpu=keys.gpu, model=parts.model, engine=parts.engine, topologies=parts.topologies)
    )
    return parts


def _assemble(keys: SweepKeys, parts: _Parts) -> SweepSpec:
    if keys.name is None or keys.gpus is None or keys.gpu is None or parts.model is None:
        raise AssertionError("a required key passed the checks without a value")
    return SweepSpec(
        name=keys.name,
        description=keys.description,
        n_gpus=keys.gpus,
        gpu=keys.gpu,
        model=parts.model.name,
        model_profile=parts.model,
        topologies=tuple(t.name for t in parts.topologies if t),
        workloads=tuple(w for w in parts.workloads if w),
        qps=tuple(rate for rate in parts.qps if rate),
        duration_s=keys.duration,
        timeout_s=keys.timeout,
        think_time_s=keys.think_time,
        seed=keys.seed,
        n_repeats=keys.repeats,
        executor=keys.executor,
        policy=parts.policy,
        placement=parts.placement,
        engine=parts.engine,
        sim=parts.sim,
        slo=SLO(**_given(keys.slo)),
        success_bound_ratio=keys.success_bound,
        token_gaps=keys.token_gaps,
        sources=parts.sources,
    )


def _given(section: StrictKeys | None) -> dict[str, Any]:
    """What the file says, by field name; the rest is for the core type's defaults."""
    return section.model_dump(exclude_unset=True) if section is not None else {}


def _name(value: Topology | WorkloadSpec) -> str:
    return value.name
