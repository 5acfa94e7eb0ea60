"""Arithmetic intensity of prefill under prefix reuse and of decode, against a GPU's ridge point.

FLOP and bytes are those that the simulator's roofline divides by its rates, at the vendor's peaks and without efficiencies: an
upper bound of what a GPU can do, and a property of the model alone. Bytes are weights (a MoE model's as far as the step's
tokens are expected to touch experts) and KV, read and written; activations stay on the chip.

``study_steps`` is the table of the agentic study, Section 4.2, by that study's own formula (reconstructed from its five
figures, which it meets to the last digit) and what each correction makes of it, one after another, up to the formula used here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ppd_bench.core.errors import SpecError
from ppd_bench.core.profiles import HardwareProfile, ModelProfile, experts_touched


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one step computes and moves."""

    flop: float
    bytes: float

    @property
    def intensity(self) -> float:
        """FLOP / bytes moved."""
        return self.flop / self.bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineRow:
    """One step on one GPU. ``flop_per_s``: what the roofline allows, min(peak, intensity * bandwidth). ``seconds``: the time
    at that rate. ``vs_decode``: intensity / that of one decode of the same context. ``reuse_ratio`` is null for decodes."""

    name: str
    reuse_ratio: float | None
    new_tokens: int
    context_tokens: int
    work: Work
    bound: str
    flop_per_s: float
    seconds: float
    vs_decode: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Rows for one model and GPU. ``ridge`` is peak FLOP/s / peak bytes/s."""

    model: str
    gpu: str
    prompt_tokens: int
    ridge: float
    peak_flop_per_s: float
    peak_bytes_per_s: float
    rows: tuple[RooflineRow, ...]


def ridge_point(hardware: HardwareProfile) -> float:
    """FLOP/byte from which a step is bound by compute."""
    return hardware.peak_flop_per_s / hardware.memory_bandwidth_bytes_per_s


def prefill_work(model: ModelProfile, new_tokens: int, cached_tokens: int) -> Work:
    """One prompt of which ``cached_tokens`` are in the cache; one position is sampled.

    Each new token attends to the cached ones and, on average, to half of the new ones.
    """
    pairs = new_tokens * cached_tokens + new_tokens**2 / 2
    return _work(model, n_tokens=new_tokens, n_sampled=1, pairs=pairs, kv_tokens=cached_tokens + new_tokens)


def decode_work(model: ModelProfile, n_sequences: int, context_tokens: int) -> Work:
    """One token of each of ``n_sequences``, each with so much context."""
    context = n_sequences * context_tokens
    return _work(model, n_tokens=n_sequences, n_sampled=n_sequences, pairs=context, kv_tokens=context)


def _work(model: ModelProfile, *, n_tokens: int, n_sampled: int, pairs: float, kv_tokens: int) -> Work:
    touched = experts_touched(model.n_experts, model.n_experts_active, n_tokens)
    return Work(
        flop=n_tokens * model.flop_per_token + pairs * model.flop_per_pair + n_sampled * model.flop_per_sample,
        bytes=model.always_read_weight_bytes
        + touched * model.expert_weight_bytes
        + kv_tokens * model.kv_bytes_per_token,
    )


def roofline(
    model: ModelProfile,
    hardware: HardwareProfile,
    *,
    prompt_tokens: int,
    reuse_ratios: Sequence[float],
    decode_batches: Sequence[int] = (1,),
) -> Roofline:
    """Prefills of ``prompt_tokens`` under each share of reuse, then decodes with that context in each batch size.

    Raises:
        SpecError: every argument that makes no sense, in one error.
    """
    _check(prompt_tokens, reuse_ratios, decode_batches)
    decode = decode_work(model, 1, prompt_tokens).intensity
    rows = []
    for ratio in reuse_ratios:
        new = new_tokens_of(prompt_tokens, ratio)
        work = prefill_work(model, new, prompt_tokens - new)
        rows.append(_row("prefill", ratio, new, prompt_tokens, work, hardware, decode))
    for n in decode_batches:
        work = decode_work(model, n, prompt_tokens)
        rows.append(_row(f"decode, batch {n}", None, n, prompt_tokens, work, hardware, decode))
    return Roofline(
        model=model.name,
        gpu=hardware.name,
        prompt_tokens=prompt_tokens,
        ridge=ridge_point(hardware),
        peak_flop_per_s=hardware.peak_flop_per_s,
        peak_bytes_per_s=hardware.memory_bandwidth_bytes_per_s,
        rows=tuple(rows),
    )


def new_tokens_of(prompt_tokens: int, reuse_ratio: float) -> int:
    """Tokens left to compute; the last one always is, for its logits are needed."""
    return max(1, round(prompt_tokens * (1.0 - reuse_ratio)))


def _check(prompt_tokens: int, reuse_ratios: Sequence[float], decode_batches: Sequence[int]) -> None:
    problems = [] if prompt_tokens >= 1 else [f"prompt tokens {prompt_tokens}; allowed: 1 or more"]
    problems += [f"reuse {ratio:g}; allowed: 0 to 1" for ratio in reuse_ratios if not 0.0 <= ratio <= 1.0]
    problems += [f"decode batch {n}; allowed: 1 or more" for n in decode_batches if n < 1]
    if problems:
        raise SpecError(problems)


def _row(
    name: str, ratio: float | None, new: int, context: int, work: Work, hardware: HardwareProfile, decode: float
) -> RooflineRow:
    bandwidth = hardware.memory_bandwidth_bytes_per_s
    return RooflineRow(
        name=name,
        reuse_ratio=ratio,
        new_tokens=new,
        context_tokens=context,
        work=work,
        bound="compute" if work.intensity >= ridge_point(hardware) else "memory",
        flop_per_s=min(hardware.peak_flop_per_s, work.intensity * bandwidth),
        seconds=max(work.flop / hardware.peak_flop_per_s, work.bytes / bandwidth),
        vs_decode=work.intensity / decode,
    )


STUDY_MODEL = "qwen3-30b-a3b"
STUDY_GPU = "h20"
STUDY_PROMPT_TOKENS = 64_000
STUDY_REUSE_RATIOS = (0.0, 0.7, 0.9, 0.95)
STUDY_INTENSITIES = (40_758.0, 20_610.0, 8_544.0, 4_549.0, 1.5)
"""Published: prefill at 0, 70, 90 and 95 % reuse, then decode (agentic study, Section 4.2)."""
_STUDY_EXPERT_WIDTH = 6144
"""``intermediate_size`` of the model's config.json, which is the width of a dense MLP; an expert's is
``moe_intermediate_size``, 768."""
_STUDY_ACTIVATION_BYTES = 16_384
"""Per new token and layer: four vectors of the hidden size (2,048) in bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    """What a formula of this family counts, per layer but for ``head_parameters``."""

    projection_parameters: int
    router_parameters: int
    head_parameters: int
    expert_parameters: int
    all_experts: bool
    flop_per_pair: int
    causal: bool
    activation_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyStep:
    """A formula and the intensities that it gives for the study's five rows."""

    change: str
    intensities: tuple[float, ...]


def study_steps(model: ModelProfile) -> list[StudyStep]:
    """From the study's formula to the one used here, one correction at a time; the last step equals ``roofline``'s rows.

    ``model``: the study's, whose values the corrections put in place of the study's assumptions.
    """
    hidden, layers = model.hidden_size, model.n_layers
    kv_width = model.n_kv_heads * model.head_dim
    terms = _Terms(
        projection_parameters=2 * hidden * hidden + 2 * hidden * kv_width,
        router_parameters=0,
        head_parameters=0,
        expert_parameters=3 * hidden * _STUDY_EXPERT_WIDTH,
        all_experts=False,
        flop_per_pair=4 * hidden,
        causal=False,
        activation_bytes=_STUDY_ACTIVATION_BYTES,
    )
    changes: dict[str, Callable[[_Terms], _Terms]] = {
        "the study's formula, as its figures give it away": lambda t: t,
        "an expert is 768 wide, not 6,144": lambda t: replace(t, expert_parameters=model.expert_parameters // layers),
        "weights of all experts that the new tokens touch are read, not of 8": lambda t: replace(t, all_experts=True),
        "32 heads of 128 attend, not a width of 2,048": lambda t: replace(
            t, flop_per_pair=model.flop_per_pair // layers
        ),
        "a new token attends to what is before it, not to the whole prompt": lambda t: replace(t, causal=True),
        "q and o project to 32 heads of 128 and back": lambda t: replace(
            t, projection_parameters=model.attention_parameters // layers
        ),
        "activations stay on the chip": lambda t: replace(t, activation_bytes=0),
        "router and output projection count": lambda t: replace(
            t, router_parameters=model.router_parameters // layers, head_parameters=model.head_parameters
        ),
    }
    steps = []
    for change, apply in changes.items():
        terms = apply(terms)
        steps.append(StudyStep(change=change, intensities=_study_intensities(terms, model)))
    return steps


def _study_intensities(terms: _Terms, model: ModelProfile) -> tuple[float, ...]:
    total = STUDY_PROMPT_TOKENS
    prefills = [new_tokens_of(total, ratio) for ratio in STUDY_REUSE_RATIOS]
    pairs = [n * (total - n) + n * n / 2 if terms.causal else n * total for n in prefills]
    steps = [*zip(prefills, pairs, strict=True), (1, float(total))]
    return tuple(_terms_intensity(terms, model, n, of_attention) for n, of_attention in steps)


def _terms_intensity(terms: _Terms, model: ModelProfile, n_tokens: int, pairs: float) -> float:
    """Every prefill and the decode read the KV of the whole prompt and sample one position."""
    common = terms.projection_parameters + terms.router_parameters
    active = common + model.n_experts_active * terms.expert_parameters
    touched = experts_touched(model.n_experts, model.n_experts_active, n_tokens)
    read = common + (touched if terms.all_experts else model.n_experts_active) * terms.expert_parameters
    flop = model.n_layers * (2 * n_tokens * active + pairs * terms.flop_per_pair) + 2 * terms.head_parameters
    moved = model.n_layers * (model.dtype_bytes * read + terms.activation_bytes * n_tokens)
    moved += model.dtype_bytes * terms.head_parameters + STUDY_PROMPT_TOKENS * model.kv_bytes_per_token
    return flop / moved
