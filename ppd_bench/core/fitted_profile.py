"""A simulator profile that ``calibrate`` fitted: its file, its checks, and what it sets in ``SimSettings``.

JSON with sorted keys and no timestamps: same inputs, same bytes.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import canonical_json, content_hash

# History. Any change that an older reader would misread takes a new version.
# 1 (2026-11-30): first version.
PROFILE_VERSION = 1
PROFILE_KIND = "simulator profile"

PROFILE_SETTINGS = (
    "step_overhead_s", "sequence_overhead_s", "visit_overhead_s", "router_overhead_s", "transfer_base_s",
    "transfer_bytes_per_s",
)  # fmt: skip
"""Fields of ``core.point.SimSettings`` that a profile may set, besides the step table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedProfile:
    """What was fitted, and on what.

    ``settings`` are values of ``PROFILE_SETTINGS``, by name, sorted; ``step_table`` is the JSON text of a step surface
    (``sim.step_tables``). ``basis`` is JSON text for people: fit and its errors, machine, versions, hash of the inputs. A profile
    is for one GPU, one model, one tensor parallel size and, where it sets transfers, one hand-off.
    """

    name: str
    gpu: str
    model: str
    tensor_parallel_size: int
    handoff: str
    settings: tuple[tuple[str, float], ...]
    step_table: str
    basis: str

    @property
    def label(self) -> str:
        """Name and content hash: what points and manifests call it."""
        return f"{self.name} ({content_hash(self._content())})"

    @property
    def sets_transfers(self) -> bool:
        return any(name.startswith("transfer") for name, _ in self.settings)

    def sim_fields(self) -> dict[str, Any]:
        """The fields of ``SimSettings`` that the profile sets, by name."""
        return {**dict(self.settings), "step_table_json": self.step_table, "fitted_profile": self.label}

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps(self._content(), indent=1, sort_keys=True, allow_nan=False) + "\n"

    def _content(self) -> dict[str, Any]:
        content = dataclasses.asdict(self)
        texts = {"step_table": json.loads(self.step_table), "basis": json.loads(self.basis)}
        head = {"kind": PROFILE_KIND, "schema_version": PROFILE_VERSION}
        return {**head, **content, **texts, "settings": dict(self.settings)}


def parse_fitted_profile(text: str, *, file: str) -> FittedProfile:
    """Read a profile that ``calibrate`` wrote.

    Raises:
        SpecError: every problem, one line each, with the file.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise SpecError(f"{file}: not JSON ({error}); give a profile that ppd-bench calibrate wrote") from error
    if not isinstance(content, dict) or content.get("kind") != PROFILE_KIND:
        raise SpecError(f"{file}: not a simulator profile; give a file that ppd-bench calibrate wrote")
    if content.get("schema_version") != PROFILE_VERSION:
        raise SpecError(
            f"{file}: profile of schema version {content.get('schema_version')}, but this ppd-bench reads version "
            f"{PROFILE_VERSION}; calibrate again"
        )
    problems = [f"{file}: {problem}" for problem in _problems(content)]
    if problems:
        raise SpecError(problems)
    return FittedProfile(
        **{name: content[name] for name in ("name", "gpu", "model", "tensor_parallel_size", "handoff")},
        settings=tuple(sorted((name, float(value)) for name, value in content["settings"].items())),
        step_table=canonical_json(content["step_table"]),
        basis=canonical_json(content["basis"]),
    )


_WORDS = {str: "text", dict: "an object", int: "a whole number"}


def _problems(content: Mapping[str, Any]) -> list[str]:
    kinds: dict[str, type] = {
        **dict.fromkeys(("name", "gpu", "model", "handoff"), str),
        **dict.fromkeys(("settings", "step_table", "basis"), dict),
        "tensor_parallel_size": int,
    }
    problems = [
        f"{name} must be {_WORDS[kind]}, got {content.get(name)!r}"
        for name, kind in kinds.items()
        if not isinstance(content.get(name), kind)
    ]
    given = content.get("settings")
    settings = given if isinstance(given, dict) else {}
    problems += [f"settings.{name} is not known; allowed: {', '.join(PROFILE_SETTINGS)}"
                 for name in settings if name not in PROFILE_SETTINGS]  # fmt: skip
    return problems + [
        f"settings.{name} must be a number, 0 or more, got {value!r}"
        for name, value in settings.items()
        if not _is_amount(value) or (name == "transfer_bytes_per_s" and value == 0)
    ]


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
