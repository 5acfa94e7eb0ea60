"""Step surfaces from aiconfigurator-core's measured vLLM kernels (``cost_model: aiconfigurator``; the extra of that name).

Its forward-pass model answers any mix of prefills and decodes, over a JSON boundary at 10 to 100 us each; a sweep asks millions
of times. So it is asked some 200 times, once per process, and a ``StepTable`` is fitted to its answers.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import lsq_linear

from ppd_bench.core.errors import SpecError
from ppd_bench.sim.step_tables.surface import StepTable

Floats = NDArray[np.float64]

PACKAGE = "aiconfigurator_core"
SYSTEMS = {"h100-80g": "h100_sxm", "h200": "h200_sxm", "a100-80g": "a100_sxm", "b200": "b200_sxm"}
"""Its names of our GPU profiles."""
MODEL_NAMES = {"llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B", "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B"}
"""Its names of our model profiles."""

KNOTS = (2, 16, 64, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
_SMALLEST_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step: one prefill of ``n_new`` tokens over ``n_cached`` (or none), and decodes that share ``context`` tokens equally."""

    n_new: int = 0
    n_cached: int = 0
    n_decode: int = 0
    context: int = 0

    @property
    def n_tokens(self) -> int:
        return self.n_new + self.n_decode

    @property
    def attention(self) -> float:
        """sum(n c + n^2 / 2), token pairs."""
        return self.n_new * self.n_cached + 0.5 * self.n_new**2


class Kernels:
    """The package's forward-pass model of one (GPU, model, tensor parallel size).

    Raises:
        SpecError: the package is not there, or has no kernels of these.
    """

    def __init__(self, gpu: str, model: str, tensor_parallel_size: int) -> None:
        problems = [
            f"cost_model aiconfigurator has no {what} {name!r}; it has {', '.join(known)}"
            for what, name, known in (("GPU", gpu, SYSTEMS), ("model", model, MODEL_NAMES))
            if name not in known
        ]
        if problems:
            raise SpecError(problems)
        self._model: Any = _load(SYSTEMS[gpu], MODEL_NAMES[model], tensor_parallel_size)

    def seconds(self, step: Step) -> float:
        """Kernels of one step, seconds."""
        scheduled = {
            "num_prefill_requests": int(step.n_new > 0),
            "sum_prefill_tokens": step.n_new,
            "sum_prefill_kv_tokens": step.n_cached,
            "num_decode_requests": step.n_decode,
            "sum_decode_kv_tokens": step.context,
        }
        return float(self._model.estimate_forward_pass_time_ms({"scheduled_requests": scheduled})) / 1e3


def _load(system: str, model: str, tensor_parallel_size: int) -> Any:
    try:
        sdk = importlib.import_module(f"{PACKAGE}.sdk")
    except ImportError as error:
        raise SpecError(
            f"cost_model aiconfigurator needs {PACKAGE}, which is not there ({error}); pip install 'ppd-bench[aiconfigurator]'"
        ) from error
    config = {
        "schema_version": 1,
        "model_name": model,
        "system_name": system,
        "backend": "vllm",
        "tp_size": tensor_parallel_size,
        "pp_size": 1,
        **dict.fromkeys(("weight_dtype", "activation_dtype", "kv_cache_dtype"), "bfloat16"),
    }
    try:
        return sdk.RustForwardPassPerfModel.from_native(config)
    except (ValueError, RuntimeError) as error:
        raise SpecError(f"{PACKAGE} has no vLLM kernels of {model} on {system}: {error}") from error


@functools.cache
def kernel_table(gpu: str, model: str, tensor_parallel_size: int) -> StepTable:
    """The surface that is nearest to the kernels, in relative error, over ``steps``.

    Raises:
        SpecError: see ``Kernels``.
    """
    kernels = Kernels(gpu, model, tensor_parallel_size)
    asked = list(steps())
    seconds = np.array([kernels.seconds(step) for step in asked])
    rows = np.array([_row(step) for step in asked]) / seconds[:, None]
    scale = np.abs(rows).max(axis=0)
    found = lsq_linear(rows / scale, np.ones(len(seconds)), bounds=(0.0, np.inf)).x / scale
    base, (d0, d1, d2, p0, p1) = found[: len(KNOTS)], found[len(KNOTS) :].tolist()
    return StepTable(
        name=f"{gpu}/{model} tp{tensor_parallel_size}, aiconfigurator",
        source=f"{PACKAGE}'s measured vLLM kernels",
        knots=tuple((float(t), max(float(s), _SMALLEST_S)) for t, s in zip(KNOTS, base, strict=True)),
        decode=(d0, d1, d2),
        prefill=(p0, p1),
    )


def steps() -> Iterator[Step]:
    """Steps that a table is fitted to: prefills and appends, decodes, and both together."""
    for n_new in KNOTS:
        yield from (Step(n_new=n_new, n_cached=cached) for cached in (0, 1024, 4096, 16384))
    for n_decode in (1, 2, 4, 8, 16, 32, 64, 128, 200, 256):
        yield from (Step(n_decode=n_decode, context=n_decode * each) for each in (256, 1024, 2048, 4096, 8192))
    for n_new in (16, 64, 256, 512, 1024, 2048):
        for n_decode in (8, 64, 200):
            for cached in (0, 2048):
                yield from (
                    Step(n_new=n_new, n_cached=cached, n_decode=n_decode, context=n_decode * each)
                    for each in (1024, 4096)
                )


def _row(step: Step) -> Floats:
    """What each unknown of the surface contributes to a step: base at every knot, d0, d1, d2, p0, p1."""
    at_knots = [float(np.interp(step.n_tokens, KNOTS, unit)) for unit in np.eye(len(KNOTS))]
    decodes, prefills = float(step.n_decode > 0), float(step.n_new > 0)
    return np.array([*at_knots, decodes, step.n_decode, step.context, prefills, step.attention], dtype=np.float64)
