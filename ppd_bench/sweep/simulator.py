"""``simulator``: settings of the simulator from the file's keys and from a fitted profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ppd_bench.core.errors import SpecError
from ppd_bench.core.fitted_profile import FittedProfile, parse_fitted_profile
from ppd_bench.core.point import EngineSettings, SimSettings
from ppd_bench.core.profiles import ModelProfile
from ppd_bench.core.topology import Topology
from ppd_bench.sweep.checks import Finding
from ppd_bench.sweep.keys import SimulatorKeys
from ppd_bench.sweep.routing import read_text
from ppd_bench.workload.strict_model import Origin

PROFILE_LOC = ("simulator", "profile")


def simulator_of(
    keys: SimulatorKeys | None, origin: Origin
) -> tuple[tuple[SimSettings, FittedProfile | None], list[str]]:
    """Settings, and the profile that they came from. A key that the file sets goes before the profile's figure."""
    given: dict[str, Any] = keys.model_dump(exclude_unset=True) if keys is not None else {}
    profile, problems = _profile(given.pop("profile", None), origin)
    path = given.pop("step_table", None)
    if path is not None:
        text, wrong = read_text(path, ("simulator", "step_table"), "the path of a step table in JSON", origin)
        problems += wrong
        given["step_table_json"] = text
    fitted = profile.sim_fields() if profile is not None else {}
    return (SimSettings(**{**fitted, **given}), profile), problems


def _profile(path: str | None, origin: Origin) -> tuple[FittedProfile | None, list[str]]:
    if path is None:
        return None, []
    text, problems = read_text(path, PROFILE_LOC, "the path of a profile that calibrate wrote", origin)
    if text is None:
        return None, problems
    try:
        return parse_fitted_profile(text, file=path), []
    except SpecError as error:
        return None, [origin.line(PROFILE_LOC, problem, "a profile that calibrate wrote") for problem in error.problems]


def profile_findings(
    profile: FittedProfile | None,
    *,
    gpu: str | None,
    model: ModelProfile | None,
    engine: EngineSettings,
    topologies: Sequence[Topology | None],
) -> Iterator[Finding]:
    """A profile that was fitted on something else than the sweep simulates."""
    if profile is None:
        return
    pairs = [("gpu", profile.gpu, gpu), ("model", profile.model, model.name if model is not None else None)]
    if profile.sets_transfers:
        pairs.append(("engine.handoff", profile.handoff, engine.handoff))
    for name, theirs, ours in pairs:
        if ours is not None and theirs != ours:
            yield PROFILE_LOC, f"was fitted with {name} {theirs}, but this sweep has {ours}", f"a profile of {ours}"
    degrees = sorted({t.tensor_parallel_size for t in topologies if t} - {profile.tensor_parallel_size})
    if degrees:
        found = ", ".join(map(str, degrees))
        what = f"was fitted with tensor parallel size {profile.tensor_parallel_size}, but this sweep has {found} too"
        yield PROFILE_LOC, what, "topologies of the profile's size only"
