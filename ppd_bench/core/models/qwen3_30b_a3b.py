"""Qwen3-30B-A3B (mixture of experts, 128 experts, 8 active). Values: the model's published config.json."""

from ppd_bench.core.profiles import ModelProfile

PROFILE = ModelProfile(
    name="qwen3-30b-a3b",
    n_layers=48,
    hidden_size=2048,
    n_heads=32,
    n_kv_heads=4,
    head_dim=128,
    intermediate_size=768,
    vocab_size=151936,
    n_experts=128,
    n_experts_active=8,
)
