"""Tests of ``benchmark/common``: sizes of layers and KV caches, and timing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from common import timing
from common.in_process import InProcess
from common.shapes import MODELS, TINY, Layout, Rank
from sglang_moe_patches.lab.predict.config import served_models


def test_a_layer_is_divided_among_ranks_by_experts_and_columns():
    kimi = MODELS["kimi-k2.5"]
    assert kimi.per_rank(Layout()) == Rank(384, 8, 7168, 2048)
    assert kimi.per_rank(Layout(tp=8, ep=2)) == Rank(192, 8, 7168, 512)
    with pytest.raises(ValueError, match="are not divisible"):
        TINY.per_rank(Layout(tp=16, ep=16))
    with pytest.raises(ValueError, match="ep must divide tp"):
        Layout(tp=4, ep=3)


@pytest.mark.parametrize(
    ("source", "name"), [("deepseek-ai/DeepSeek-R1", "deepseek-v3"), ("moonshotai/Kimi-K2.5", "kimi-k2.5")]
)
def test_expert_groups_are_those_of_the_models_configuration(source, name):
    configs = {model["source"]: model["config"] for model in served_models()}
    own = configs[source].get("text_config", configs[source])
    assert MODELS[name].groups == (own["n_group"], own["topk_group"])


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"kv_lora_rank": 512}, (0, 512)),
        ({"num_key_value_heads": 2, "head_dim": 32}, (2, 32)),
        ({"num_key_value_heads": 2, "hidden_size": 64, "num_attention_heads": 4}, (2, 16)),
        ({"num_key_value_heads": 2, "head_dim": None, "hidden_size": 64, "num_attention_heads": 4}, (2, 16)),
    ],
    ids=["latents", "head_dim", "no head_dim", "head_dim is None"],
)
def test_heads_and_head_size_of_the_kv_cache(config, kind):
    assert InProcess._cache_kind(SimpleNamespace(**config)) == kind


def test_versions_run_in_turn_and_every_other_round_backwards():
    order = []

    def version(name, times):
        def run():
            order.append(name)
            return times[order.count(name) - 1]

        return run

    stock, patched = [9.0, 4.0, 2.0, 6.0], [9.0, 2.0, 2.0, 2.0]
    samples = timing.run_in_turn({"stock": version("stock", stock), "patched": version("patched", patched)}, 3)
    assert order == ["patched", "stock", "stock", "patched", "patched", "stock", "stock", "patched"]
    assert samples == {"stock": stock[1:], "patched": patched[1:]}
    assert timing.compare_with_stock(samples) == {
        "patched": {"stock": 4.0, "other": 2.0, "ratio": 2.0, "lowest": 1.0, "highest": 3.0, "pairs": 3}
    }
