"""Llama-3.1-8B (dense, GQA). Values: the model's published config.json; KV 131,072 bytes per token in bf16."""

from ppd_bench.core.profiles import ModelProfile

PROFILE = ModelProfile(
    name="llama-3.1-8b",
    n_layers=32,
    hidden_size=4096,
    n_heads=32,
    n_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
)
