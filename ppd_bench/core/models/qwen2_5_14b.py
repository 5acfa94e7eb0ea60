"""Qwen2.5-14B (dense, GQA). Values: the model's published config.json."""

from ppd_bench.core.profiles import ModelProfile

PROFILE = ModelProfile(
    name="qwen2.5-14b",
    n_layers=48,
    hidden_size=5120,
    n_heads=40,
    n_kv_heads=8,
    head_dim=128,
    intermediate_size=13824,
    vocab_size=152064,
)
