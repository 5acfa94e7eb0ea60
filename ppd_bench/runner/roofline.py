"""``ppd-bench roofline``: arithmetic intensity of a model's prefill under prefix reuse and of its decode, on a GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppd_bench.analysis.roofline import (
    STUDY_GPU,
    STUDY_INTENSITIES,
    STUDY_MODEL,
    STUDY_PROMPT_TOKENS,
    STUDY_REUSE_RATIOS,
    Roofline,
    StudyStep,
    roofline,
    study_steps,
)
from ppd_bench.core.errors import SpecError
from ppd_bench.core.hardware import HARDWARE
from ppd_bench.core.point import plain
from ppd_bench.core.profiles import HardwareProfile, ModelProfile
from ppd_bench.store.atomic import make_folder, write_bytes
from ppd_bench.sweep.names import resolve_model, resolve_name
from ppd_bench.workload.strict_model import Origin

DECODE_BATCHES = (1, 8, 64)
BASIS = "estimated: FLOP and bytes of the model over the vendor's peaks; nothing was run"


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineRequest:
    """What is asked; the defaults are those of the agentic study, Section 4.2."""

    model: str = STUDY_MODEL
    gpu: str = STUDY_GPU
    prompt_tokens: int = STUDY_PROMPT_TOKENS
    reuse_ratios: tuple[float, ...] = STUDY_REUSE_RATIOS
    decode_batches: tuple[int, ...] = DECODE_BATCHES


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The study's figures, and what its formula and each correction of it give; null where the request is another one."""

    intensities: tuple[float, ...]
    steps: tuple[StudyStep, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineResult:
    roofline: Roofline
    published: Published | None

    def to_json(self) -> str:
        """All figures with what they rest on."""
        content: dict[str, Any] = {"basis": BASIS, "roofline": plain(self.roofline), "published": plain(self.published)}
        for row, values in zip(self.roofline.rows, content["roofline"]["rows"], strict=True):
            values["intensity"] = row.work.intensity
        return json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n"


def run_roofline(request: RooflineRequest) -> RooflineResult:
    """The verb.

    Raises:
        SpecError: every unknown name and impossible argument.
    """
    model, hardware = _profiles(request.model, request.gpu)
    found = roofline(
        model,
        hardware,
        prompt_tokens=request.prompt_tokens,
        reuse_ratios=request.reuse_ratios,
        decode_batches=request.decode_batches,
    )
    published = None
    if (request.model, request.gpu, request.prompt_tokens) == (STUDY_MODEL, STUDY_GPU, STUDY_PROMPT_TOKENS):
        published = Published(intensities=STUDY_INTENSITIES, steps=tuple(study_steps(model)))
    return RooflineResult(roofline=found, published=published)


def write_roofline(result: RooflineResult, folder: Path) -> list[Path]:
    """``roofline.json`` and the plot in a folder, which is made.

    Raises:
        StoreError: it cannot be written.
    """
    from ppd_bench.report.reuse_plots import figure_roofline  # matplotlib takes a second; only what draws should pay
    from ppd_bench.report.style import save

    make_folder(folder)
    path = folder / "roofline.json"
    write_bytes(path, result.to_json().encode())
    return [path, *save(figure_roofline(result.roofline), folder / "roofline")]


def _profiles(model: str, gpu: str) -> tuple[ModelProfile, HardwareProfile]:
    origin = Origin(file="command line", overridden=frozenset({("model",), ("gpu",)}))
    profile, problems = resolve_model(model, origin)
    name, more = resolve_name(gpu, ("gpu",), "gpu", tuple(HARDWARE), origin)
    if profile is None or name is None:
        raise SpecError([*problems, *more])
    return profile, HARDWARE[name]
