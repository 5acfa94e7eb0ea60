"""A minimal sweep, and the names that exist."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from ppd_bench.sweep.library import resolve_sweep
from ppd_bench.sweep.spec import SweepSpec, load_sweep

DECIDERS = ("node", "always_pd", "always_local", "fraction", "table", "threshold")
PLACEMENTS = ("round_robin", "least_inflight", "least_tokens", "session_affinity", "cache_aware")

MINIMAL = {
    "name": "mini",
    "gpus": "4",
    "gpu": "h100-80g",
    "model": "llama-3.1-8b",
    "topologies": "[4R, 1P_3D]",
    "workloads": "[small_tiny]",
    "qps": "[1, 2]",
}

Load = Callable[..., SweepSpec]


@pytest.fixture
def load() -> Load:
    """Load the minimal sweep with some keys replaced (null: left out) and overrides."""

    def loader(overrides: Mapping[str, Any] | None = None, *, extra: str = "", **keys: str | None) -> SweepSpec:
        lines = [f"{key}: {value}" for key, value in {**MINIMAL, **keys}.items() if value is not None]
        text = "\n".join([*lines, extra])
        return load_sweep(text, file="s.yaml", deciders=DECIDERS, placements=PLACEMENTS, overrides=overrides)

    return loader


@pytest.fixture
def bundled() -> Load:
    """Load a sweep that ships with the project."""

    def loader(name: str, overrides: Mapping[str, Any] | None = None) -> SweepSpec:
        text, shown = resolve_sweep(name)
        return load_sweep(text, file=shown, deciders=DECIDERS, placements=PLACEMENTS, overrides=overrides)

    return loader
