"""A sweep that runs in about a second."""

from __future__ import annotations

from pathlib import Path

import pytest

SMALL = """
name: small
gpus: 4
gpu: h100-80g
model: llama-3.1-8b
topologies: [4R, 1P_3D, 1P_3pD]
workloads: [small_tiny, large_huge_paste]
qps: [1, 4]
duration: 4s
timeout: 30s
"""


class Quiet:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.begun: tuple[int, int] | None = None
        self.done: list[str] = []
        self.stages: list[str] = []

    def started(self, n_points: int, n_finished: int) -> None:
        self.begun = (n_points, n_finished)

    def point_done(self, point: object, n_turns: int, n_ok: int) -> None:
        self.done.append(str(point))

    def stage(self, text: str) -> None:
        self.stages.append(text)


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def quiet() -> Quiet:
    return Quiet()
