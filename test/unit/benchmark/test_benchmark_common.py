"""What the benchmarks share."""

from __future__ import annotations

import pytest
from common import timing
from common.shapes import MODELS, TINY, Layout, Rank


@pytest.mark.parametrize(
    ("model", "module", "config"),
    [
        ("deepseek-v3", "deepseek_v3", "DeepseekV3Config"),
        ("minimax-m2", "minimax_m2", "MiniMaxM2Config"),
        ("mixtral-8x7b", "mixtral", "MixtralConfig"),
    ],
)
def test_a_shape_is_the_models_own(model, module, config):
    """These three are the defaults of their configuration in transformers; minimax_m2 only in newer ones."""
    defaults = pytest.importorskip(f"transformers.models.{module}.configuration_{module}")
    theirs = getattr(defaults, config)()
    ours = MODELS[model]
    names = {
        "hidden": ("hidden_size",),
        "layers": ("num_hidden_layers",),
        "heads": ("num_attention_heads",),
        "kv_heads": ("num_key_value_heads",),
        "top_k": ("num_experts_per_tok",),
        "experts": ("n_routed_experts", "num_local_experts"),
        "moe_intermediate": ("moe_intermediate_size", "intermediate_size"),
        "dense_layers": ("first_k_dense_replace",),
        "shared_experts": ("n_shared_experts",),
        "q_lora_rank": ("q_lora_rank",),
    }
    for ours_name, candidates in names.items():
        expected = next((getattr(theirs, name) for name in candidates if hasattr(theirs, name)), None)
        if expected is not None:
            assert getattr(ours, ours_name) == expected, ours_name
    if ours.groups != (1, 1):
        assert ours.groups == (theirs.n_group, theirs.topk_group)


def test_ranks_share_a_layer_by_experts_or_by_columns():
    kimi = MODELS["kimi-k2.5"]
    assert kimi.per_rank(Layout()) == Rank(384, 8, 7168, 2048)
    assert kimi.per_rank(Layout(tp=4)) == Rank(384, 8, 7168, 512)
    assert kimi.per_rank(Layout(tp=8, ep=8)) == Rank(48, 8, 7168, 2048)
    assert kimi.per_rank(Layout(tp=8, ep=2)) == Rank(192, 8, 7168, 512)
    with pytest.raises(ValueError, match="do not divide"):
        TINY.per_rank(Layout(tp=16, ep=16))
    with pytest.raises(ValueError, match="ep must divide tp"):
        Layout(tp=4, ep=3)


def test_versions_run_in_turn_and_every_other_round_backwards():
    order = []

    def version(name, times):
        def run():
            order.append(name)
            return times[order.count(name) - 1]

        return run

    stock, patched = [9.0, 4.0, 2.0, 6.0], [9.0, 2.0, 2.0, 2.0]
    samples = timing.in_turn({"stock": version("stock", stock), "patched": version("patched", patched)}, 3)
    assert order == ["patched", "stock", "stock", "patched", "patched", "stock", "stock", "patched"]
    assert samples == {"stock": stock[1:], "patched": patched[1:]}
    assert timing.against_stock(samples) == {
        "patched": {"stock": 4.0, "other": 2.0, "ratio": 2.0, "lowest": 1.0, "highest": 3.0, "pairs": 3}
    }
