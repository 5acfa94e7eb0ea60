"""Model and GPU profiles against the figures that are known of them."""

from __future__ import annotations

import pytest

from ppd_bench.core.errors import SpecError
from ppd_bench.core.hardware import HARDWARE
from ppd_bench.core.models import MODELS
from ppd_bench.core.profiles import model_from_hf_config

QWEN3_MOE = {
    "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "moe_intermediate_size": 768, "intermediate_size": 6144, "vocab_size": 151936, "num_experts": 128,
    "num_experts_per_tok": 8, "torch_dtype": "bfloat16", "max_position_embeddings": 40960,
}  # fmt: skip


def test_llama_has_the_published_kv_bytes_and_flop() -> None:
    llama = MODELS["llama-3.1-8b"]
    assert llama.kv_bytes_per_token == 131_072
    body = llama.active_parameters - llama.head_parameters
    assert 2 * body == pytest.approx(13.96e9, rel=1e-3)
    # What a step reads: all weights but the embedding table.
    assert llama.weight_bytes - 2 * llama.head_parameters == pytest.approx(15.01e9, rel=1e-3)


def test_a_moe_config_gives_its_total_and_active_parameters() -> None:
    model = model_from_hf_config("qwen", QWEN3_MOE)
    built_in = MODELS["qwen3-30b-a3b"]
    assert (model.weight_bytes, model.active_parameters) == (built_in.weight_bytes, built_in.active_parameters)
    assert model.weight_bytes / 2 == pytest.approx(30.5e9, rel=0.01)
    assert model.active_parameters == pytest.approx(3.0e9, rel=0.05)


def test_every_missing_field_of_a_config_is_named_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        model_from_hf_config("m", {"num_hidden_layers": 0, "hidden_size": "x", "num_experts": 4})
    told = "\n".join(caught.value.problems)
    for field in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "intermediate_size",
                  "num_experts_per_tok"):  # fmt: skip
        assert field in told


def test_every_profile_says_where_its_figures_come_from() -> None:
    for name, profile in HARDWARE.items():
        assert profile.name == name
        assert len(profile.source) > 20
        for ratio in (profile.compute_efficiency_ratio, profile.weight_bandwidth_ratio, profile.kv_bandwidth_ratio):
            assert 0 < ratio <= 1
    assert all(MODELS[name].name == name for name in MODELS)
