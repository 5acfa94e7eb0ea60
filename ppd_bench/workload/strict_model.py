"""Files against pydantic models: every problem of a file as one line that says where, what, and what is allowed."""

from __future__ import annotations

import copy
import difflib
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ppd_bench.workload.strict_yaml import Loc, shown_path


class StrictKeys(BaseModel):
    """Base of the models of a file. A field's description is the text after ``allowed:`` in an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where values come from: ``file``, or the command line for the paths in ``overridden``.

    ``flags``: options that are not called as their keys are.
    """

    file: str
    overridden: frozenset[Loc] = frozenset()
    flags: Mapping[Loc, str] = field(default_factory=dict)

    def place(self, loc: Loc) -> str:
        """``FILE: key.path``, or ``command line: --flag`` for an override."""
        given = [loc[:n] for n in range(1, len(loc) + 1) if loc[:n] in self.overridden]
        if given:
            return f"command line: --{self.flags.get(given[0], str(given[0][-1]).replace('_', '-'))}"
        return f"{self.file}: {shown_path(loc)}"

    def line(self, loc: Loc, what: str, allowed: str) -> str:
        """``FILE: key.path: what is wrong; allowed: ...``"""
        return f"{self.place(loc)}: {what}; allowed: {allowed}"

    def unknown(self, loc: Loc, noun: str, word: object, allowed: Collection[str]) -> str:
        """The line for a name that does not exist, with the one that goes on from it, or else the closest one."""
        begun = [name for name in allowed if word and name.lower().startswith(str(word).lower())]
        close = begun or difflib.get_close_matches(str(word), list(allowed), n=1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        return self.line(loc, f"unknown {noun} {reprlib.repr(word)}{hint}", ", ".join(allowed))


def model_keys(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The keys of a model as a file spells them."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def nested_model(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a section, or of the items of a list of sections; null for plain values."""
    candidates = (field.annotation, *get_args(field.annotation))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def problems_of(error: ValidationError, model: type[BaseModel], origin: Origin) -> list[str]:
    """One line per error of a validation against ``model``; keys that are not text are the YAML reader's to report."""
    found = error.errors(include_url=False)
    return [_line(details, model, origin) for details in found if details["type"] != "invalid_key"]


def without_bad_keys(data: Mapping[str, Any], error: ValidationError) -> dict[str, Any]:
    """A copy of ``data`` without the keys that ``error`` names (whole lists included): what can still be checked."""
    pruned = copy.deepcopy(dict(data))
    for details in error.errors(include_url=False):
        holder: Any = pruned
        for part, after in zip(details["loc"], (*details["loc"][1:], None), strict=True):
            if not isinstance(after, str) or not isinstance(holder.get(part), dict):
                holder.pop(part, None)
                break
            holder = holder[part]
    return pruned


def _line(details: ErrorDetails, model: type[BaseModel], origin: Origin) -> str:
    loc = details["loc"]
    names = [part for part in loc if isinstance(part, str)]
    owner = model
    for name in names[:-1]:
        field = model_keys(owner).get(name)
        owner = (nested_model(field) if field else None) or owner
    keys = model_keys(owner)
    kind = details["type"]
    if kind == "extra_forbidden":
        return origin.unknown(loc, "key", names[-1], tuple(keys))
    field = keys.get(names[-1]) if names else None
    section = nested_model(field) if field else None
    if kind == "model_type" and section:
        what = f"must be a mapping of keys, got {reprlib.repr(details['input'])}"
        return origin.line(loc, what, f"the keys {', '.join(model_keys(section))}")
    return origin.line(loc, _what(details), (field.description if field else None) or "see sweeps/all-keys.yaml")


def _what(details: ErrorDetails) -> str:
    if details["type"] == "missing":
        return "is missing"
    if details["type"] == "value_error":
        return str(details["ctx"]["error"])
    message = details["msg"].replace("Input should", "must")
    return f"{message[0].lower()}{message[1:]}, got {reprlib.repr(details['input'])}"
