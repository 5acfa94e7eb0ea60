"""The ``policy`` and ``placement`` sections, whose parameters depend on the names that they choose."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppd_bench.core.point import Params, PlacementSpec, PolicySpec
from ppd_bench.sweep.keys import PlacementKeys, PolicyKeys
from ppd_bench.sweep.names import resolve_name
from ppd_bench.workload.strict_model import Origin
from ppd_bench.workload.strict_yaml import Loc

PARAM_ALLOWED = "a finite number, text, true, false"


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Names that exist; ``parameters`` maps a decider or placement to its parameters, null leaves those unchecked."""

    deciders: Collection[str]
    placements: Collection[str]
    parameters: Mapping[str, Collection[str]] | None = None


def policy_of(keys: PolicyKeys, known: Known, origin: Origin) -> tuple[PolicySpec, list[str]]:
    """The policy, and what is wrong with it."""
    chosen = keys.model_dump(exclude_unset=True, include={"decider"})
    decider = PolicySpec(**chosen).decider
    _, problems = resolve_name(decider, ("policy", "decider"), "decider", known.deciders, origin)
    params, wrong = _params(keys, "policy", (decider,), known, origin)
    table_json, table_wrong = _table_json(keys.table, decider, origin)
    wrong += table_wrong
    if decider == "fraction":
        wrong += _x_problems(dict(params), origin)
    return PolicySpec(**chosen, params=params, table_json=table_json), problems + wrong


def placement_of(keys: PlacementKeys, known: Known, origin: Origin) -> tuple[PlacementSpec, list[str]]:
    """The placement, and what is wrong with it. Parameters are those of any of the three chosen placements."""
    chosen = keys.model_dump(exclude_unset=True, include=set(PlacementKeys.model_fields))
    spec = PlacementSpec(**chosen)
    problems: list[str] = []
    for role in ("prefill", "decode", "replica"):
        problems += resolve_name(getattr(spec, role), ("placement", role), "placement", known.placements, origin)[1]
    params, wrong = _params(keys, "placement", (spec.prefill, spec.decode, spec.replica), known, origin)
    return PlacementSpec(**chosen, params=params), problems + wrong


def _params(
    keys: PolicyKeys | PlacementKeys, section: str, names: Collection[str], known: Known, origin: Origin
) -> tuple[Params, list[str]]:
    given: dict[str, Any] = keys.model_extra or {}
    problems = [
        origin.line((section, key), f"must be one value, got {reprlib.repr(value)}", PARAM_ALLOWED)
        for key, value in given.items()
        if not isinstance(value, bool | int | float | str) or (isinstance(value, float) and not math.isfinite(value))
    ]
    if known.parameters is not None and set(names) <= {*known.deciders, *known.placements}:
        own = (param for name in names for param in known.parameters.get(name, ()))
        accepted = sorted({*type(keys).model_fields, *own})
        problems += [origin.unknown((section, key), "key", key, accepted) for key in given if key not in accepted]
    return tuple(sorted((key, _one_spelling(value)) for key, value in given.items())), problems


def _one_spelling(value: Any) -> Any:
    """1 for 1.0: equal parameters must give equal point ids."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _table_json(path: str | None, decider: str, origin: Origin) -> tuple[str | None, list[str]]:
    loc = ("policy", "table")
    if (decider == "table") != (path is not None):
        what = "is missing" if path is None else f"belongs to decider 'table', not to {decider!r}"
        return None, [origin.line(loc, what, "the path of a table.json, with decider 'table' only")]
    if path is None:
        return None, []
    return read_text(path, loc, "the path of a table.json that build-table wrote", origin)


def read_text(path: str, loc: Loc, allowed: str, origin: Origin) -> tuple[str | None, list[str]]:
    """A file that a key names, and what is wrong with it."""
    try:
        return Path(path).read_text(encoding="utf-8"), []
    except OSError as error:
        what = f"{path} cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        what = f"{path} is not UTF-8 text"
    return None, [origin.line(loc, what, allowed)]


def _x_problems(params: Mapping[str, object], origin: Origin) -> list[str]:
    x = params.get("x")
    if isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x <= 1:
        return []
    what = "is missing" if x is None else f"must be a ratio, got {x!r}"
    return [origin.line(("policy", "x"), what, "a number from 0 to 1, the share of follow-up turns prefilled on D")]
