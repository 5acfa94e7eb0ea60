"""Types of GPU and model profiles. The values live in ``core.hardware`` and ``core.models``, one file each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ppd_bench.core.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """One accelerator. Peaks are dense bf16 figures of the vendor; efficiencies are what real kernels reach of them.

    ``source`` says where each figure comes from. ``kv_link_bytes_per_s`` is the effective rate of one KV transfer
    between two such GPUs in one node. ``memory_bytes`` is what the driver reports, which is above the name's round figure.
    """

    name: str
    peak_flop_per_s: float
    memory_bandwidth_bytes_per_s: float
    memory_bytes: int
    compute_efficiency_ratio: float
    weight_bandwidth_ratio: float
    kv_bandwidth_ratio: float
    kv_link_bytes_per_s: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """A decoder-only transformer, dense or mixture of experts, as far as cost and memory depend on it.

    For dense models ``n_experts`` is 0 and ``intermediate_size`` is the MLP width; for MoE models it is one expert's width.
    """

    name: str
    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool = False
    n_experts: int = 0
    n_experts_active: int = 0
    dtype_bytes: int = 2
    max_model_len: int = 131072

    @property
    def kv_bytes_per_token(self) -> int:
        """2 * layers * kv_heads * head_dim * bytes (GLOSSARY)."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def attention_parameters(self) -> int:
        """Parameters of all attention projections (q, k, v, o)."""
        per_layer = self.hidden_size * self.head_dim * (2 * self.n_heads + 2 * self.n_kv_heads)
        return self.n_layers * per_layer

    @property
    def expert_parameters(self) -> int:
        """Parameters of one MLP (gate, up, down) over all layers; of one expert in a MoE model."""
        return self.n_layers * 3 * self.hidden_size * self.intermediate_size

    @property
    def router_parameters(self) -> int:
        return self.n_layers * self.hidden_size * self.n_experts

    @property
    def head_parameters(self) -> int:
        """The output projection, which every step reads."""
        return self.vocab_size * self.hidden_size

    @property
    def active_parameters(self) -> int:
        """Parameters that one token multiplies with (the embedding look-up is not a multiplication)."""
        mlps = self.expert_parameters * (self.n_experts_active if self.n_experts else 1)
        return self.attention_parameters + self.router_parameters + mlps + self.head_parameters

    @property
    def flop_per_token(self) -> int:
        """FLOP of one token in all layers but for attention over its context: 2 per active parameter outside the output
        projection."""
        return 2 * (self.active_parameters - self.head_parameters)

    @property
    def flop_per_pair(self) -> int:
        """Attention FLOP of one token with one token of its context: q k^T and a v (524,288 for Llama-3.1-8B)."""
        return 4 * self.n_layers * self.n_heads * self.head_dim

    @property
    def flop_per_sample(self) -> int:
        """FLOP of the output projection, which only sampled positions pay."""
        return 2 * self.head_parameters

    @property
    def always_read_weight_bytes(self) -> int:
        """Bytes of the weights that every step reads: all but a MoE model's experts, and but the embedding table."""
        mlps = 0 if self.n_experts else self.expert_parameters
        return (self.attention_parameters + self.router_parameters + mlps + self.head_parameters) * self.dtype_bytes

    @property
    def expert_weight_bytes(self) -> int:
        """Bytes of one expert of a MoE model over all layers; 0 for dense models."""
        return self.expert_parameters * self.dtype_bytes if self.n_experts else 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory, the embedding table included."""
        mlps = self.expert_parameters * (self.n_experts or 1)
        embeddings = self.head_parameters * (1 if self.tied_embeddings else 2)
        return (self.attention_parameters + self.router_parameters + mlps + embeddings) * self.dtype_bytes


def experts_touched(n_experts: int, n_experts_active: int, n_tokens: int) -> float:
    """Experts that ``n_tokens`` tokens are expected to need, E (1 - (1 - k/E)^T), with uniform routing assumed; 0 without
    experts."""
    return n_experts * (1.0 - (1.0 - n_experts_active / n_experts) ** n_tokens) if n_experts else 0.0


def model_from_hf_config(name: str, config: Mapping[str, Any]) -> ModelProfile:
    """Build a profile from the fields of a Hugging Face ``config.json`` of a Llama-like or Qwen-MoE-like model.

    Raises:
        SpecError: every missing or unusable field, in one error.
    """
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    width_key = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
    problems = [
        f"{name}: config field {key!r} must be a positive integer, got {config.get(key)!r}"
        for key in (*needed, width_key, *(("num_experts_per_tok",) if experts else ()))
        if not isinstance(config.get(key), int) or config[key] <= 0
    ]
    if problems:
        raise SpecError(problems)
    n_heads = config["num_attention_heads"]
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    return ModelProfile(
        name=name,
        n_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        n_heads=n_heads,
        n_kv_heads=config.get("num_key_value_heads") or n_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // n_heads,
        intermediate_size=config[width_key],
        vocab_size=config["vocab_size"],
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        n_experts=experts,
        n_experts_active=config.get("num_experts_per_tok", 0) if experts else 0,
        dtype_bytes=4 if dtype == "float32" else 2,
        max_model_len=config.get("max_position_embeddings", 131072),
    )
