"""The few-layer Llama that ``engine.tiny_model`` writes: proves paths on CPU engines, in float32, with random weights."""

from ppd_bench.core.profiles import ModelProfile

PROFILE = ModelProfile(
    name="tiny-llama",
    n_layers=4,
    hidden_size=256,
    n_heads=4,
    n_kv_heads=2,
    head_dim=64,
    intermediate_size=512,
    vocab_size=1024,
    dtype_bytes=4,
    max_model_len=8192,
)
