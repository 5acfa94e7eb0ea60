"""Model profiles by name. Adding one costs one file and one line here."""

from __future__ import annotations

from ppd_bench.core.models import llama_3_1_8b, qwen2_5_14b, qwen3_30b_a3b, qwen3_coder_30b_a3b, tiny_llama
from ppd_bench.core.profiles import ModelProfile

MODELS: dict[str, ModelProfile] = {
    "llama-3.1-8b": llama_3_1_8b.PROFILE,
    "qwen2.5-14b": qwen2_5_14b.PROFILE,
    "qwen3-30b-a3b": qwen3_30b_a3b.PROFILE,
    "qwen3-coder-30b-a3b": qwen3_coder_30b_a3b.PROFILE,
    "tiny-llama": tiny_llama.PROFILE,
}
