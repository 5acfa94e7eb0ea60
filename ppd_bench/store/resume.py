"""May this run continue in that folder? Pure rules and their messages."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ppd_bench.core.errors import StoreError
from ppd_bench.store.manifest import Manifest

_MAX_SHOWN = 12
_MAX_VALUE_CHARS = 100
_ABSENT = "(absent)"


def check_executor(folder: Path, stored: Manifest, new: Manifest) -> None:
    """Refuse to mix simulated and measured points.

    Raises:
        StoreError: the folder belongs to the other executor.
    """
    if stored.executor != new.executor:
        raise StoreError(
            f"{folder}: holds a {stored.executor.evidence} run (executor {stored.executor}), but this one would be "
            f"{new.executor.evidence} (executor {new.executor}); use another --out or --name, or delete the folder"
        )


def check_points(
    folder: Path, stored: Manifest, new: Manifest, finished: Collection[str], wanted: Collection[str]
) -> tuple[str, ...]:
    """Notices for a resume that keeps every finished point.

    Args:
        finished: ids of the points in the folder.
        wanted: ids of the points of the new spec.

    Raises:
        StoreError: a finished point is not wanted any more; names what changed in the spec.
    """
    lost = set(finished) - set(wanted)
    changes = changed_keys(stored.spec, new.spec)
    if lost:
        raise StoreError(
            f"{folder}: changed spec under the same name: {len(lost):,} of the {len(finished):,} finished points are "
            f"not in the new spec. Changed: {_listed(changes) or _same_spec(stored, new)}. Use another --out or "
            f"--name, or delete the folder to start afresh"
        )
    n_finished = len(finished)
    return (
        *_spec_notice(folder, stored, new, n_finished, changes),
        *_session_notice(folder, stored, new, n_finished),
    )


def merged(stored: Manifest, new: Manifest) -> Manifest:
    """The manifest to go on with: the new spec, the first session's provenance, later sessions where they differ."""
    sessions = list(stored.resumed)
    known = [{"versions": s["versions"], "machine": s["machine"]} for s in sessions]
    if _session(new) not in [_session(stored), *known]:
        sessions.append({"created": new.created, **_session(new)})
    return dataclasses.replace(
        new, versions=stored.versions, machine=stored.machine, created=stored.created, resumed=sessions
    )


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Lines ``key.path: old -> new`` for every leaf that differs between two nested mappings, sorted by key."""
    before, after = _leaves(old, ""), _leaves(new, "")
    return [
        f"{key}: {_short(before, key)} -> {_short(after, key)}"
        for key in sorted(before.keys() | after.keys())
        if _short(before, key) != _short(after, key) or before.get(key) != after.get(key)
    ]


def _leaves(content: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            leaves.update(_leaves(value, f"{prefix}{key}."))
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def _short(leaves: Mapping[str, Any], key: str) -> str:
    if key not in leaves:
        return _ABSENT
    text = json.dumps(leaves[key])
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[: _MAX_VALUE_CHARS - 3]}..."


def _listed(changes: list[str]) -> str:
    more = [f"and {len(changes) - _MAX_SHOWN} more"] if len(changes) > _MAX_SHOWN else []
    return "; ".join([*changes[:_MAX_SHOWN], *more])


def _session(manifest: Manifest) -> dict[str, Any]:
    return {"versions": manifest.versions, "machine": manifest.machine}


def _same_spec(stored: Manifest, new: Manifest) -> str:
    versions = _listed(changed_keys(stored.versions, new.versions))
    return f"nothing in the spec, but {f'versions ({versions})' if versions else 'the program that made the points'}"


def _spec_notice(folder: Path, stored: Manifest, new: Manifest, n_finished: int, changes: list[str]) -> tuple[str, ...]:
    if not changes:
        return ()
    return (
        f"{folder}: the spec changed ({_listed(changes)}); all {n_finished:,} finished points belong to the new spec "
        f"too and are kept; the run has {new.n_points:,} points now ({stored.n_points:,} before)",
    )


def _session_notice(folder: Path, stored: Manifest, new: Manifest, n_finished: int) -> tuple[str, ...]:
    changes = changed_keys(_session(stored), _session(new))
    if not n_finished or not changes:
        return ()
    return (
        f"{folder}: {n_finished:,} points were finished in another environment ({_listed(changes)}) and are kept; "
        f"the manifest lists both",
    )
