"""Qwen3-Coder-30B-A3B-Instruct: Qwen3-30B-A3B's shape, trained for longer prompts. Values: the model's published config.json."""

import dataclasses

from ppd_bench.core.models import qwen3_30b_a3b

PROFILE = dataclasses.replace(qwen3_30b_a3b.PROFILE, name="qwen3-coder-30b-a3b", max_model_len=262144)
