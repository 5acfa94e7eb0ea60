"""YAML that hides nothing: syntax errors with their place, and keys that are written twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from ppd_bench.core.errors import SpecError

Loc = tuple[str | int, ...]
"""Where a value stands in a file: keys and list indices from the top."""


def shown_path(loc: Loc) -> str:
    """``("turns", 1, "input_tokens")`` as ``turns[1].input_tokens``."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc]
    return "".join(parts).removeprefix(".") or "(whole file)"


def read_mapping(text: str, *, file: str) -> tuple[dict[str, Any], list[str]]:
    """Parse one YAML document whose top level is a mapping.

    Returns the mapping, and one line per key that is not text or is written twice, so that a caller can report them
    together with what else is wrong.

    Raises:
        SpecError: text that is not YAML (with line and column), or another top level.
    """
    loader: yaml.SafeLoader | None = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        data = loader.construct_document(node) if node else None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SpecError(f"{file}: {_syntax_problem(error)}; allowed: one YAML document") from error
    finally:
        if loader is not None:
            loader.dispose()
    if node is None or not isinstance(data, dict):
        found = "an empty file" if data is None else f"a {type(data).__name__}"
        raise SpecError(f"{file}: (whole file): is {found}; allowed: a mapping of keys to values")
    return data, [f"{file}: {problem}" for problem in _key_problems(node, (), set())]


def _syntax_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is not None:
        what = getattr(error, "problem", None) or getattr(error, "context", None)
        return f"line {mark.line + 1}, column {mark.column + 1}: not valid YAML: {what}"
    if isinstance(error, RecursionError):
        return "(whole file): not usable YAML: nested too deeply"
    return f"(whole file): not valid YAML: {' '.join(str(error).split())}"


def _key_problems(node: yaml.Node, loc: Loc, seen: set[int]) -> Iterator[str]:
    if id(node) in seen:  # an alias shows the same node twice, and may even contain itself
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _key_problems(item, (*loc, index), seen)
    elif isinstance(node, yaml.MappingNode):
        first_line: dict[str, int] = {}
        for key, value in node.value:
            here = (*loc, str(key.value))
            line = key.start_mark.line + 1
            if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                yield f"{shown_path(here)}: key on line {line} is not text; allowed: text keys (quote it)"
            elif key.value in first_line:
                lines = f"lines {first_line[key.value]} and {line}"
                yield f"{shown_path(here)}: written twice ({lines}); allowed: each key once"
            first_line.setdefault(str(key.value), line)
            yield from _key_problems(value, here, seen)
