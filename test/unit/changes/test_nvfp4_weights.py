"""nvfp4-weights: what is given up of a layer that Marlin runs."""

from __future__ import annotations

import torch
from sglang_moe_patches.changes import nvfp4_weights

NAMES = ("w13_blockscale_swizzled", "w2_blockscale_swizzled")


def test_a_byte_for_each_expert_stays_of_the_same_type() -> None:
    layer = torch.nn.Module()
    for name in NAMES:
        scales = torch.ones(3, 128, 4).to(torch.float8_e4m3fn)
        layer.register_parameter(name, torch.nn.Parameter(scales, requires_grad=False))
    layer.w2_weight_scale = other = torch.nn.Parameter(torch.ones(3, 4), requires_grad=False)
    assert nvfp4_weights.give_up_swizzled_scales(layer) == 2 * (3 * 128 * 4 - 3)
    for name in NAMES:
        kept = dict(layer.named_parameters())[name]  # the weight offloader finds it by name
        assert (kept.shape, kept.dtype, kept.requires_grad) == ((3, 1, 1), torch.float8_e4m3fn, False)
    assert layer.w2_weight_scale is other
    assert nvfp4_weights.give_up_swizzled_scales(layer) == 0


def test_where_the_engine_makes_none_there_is_none() -> None:
    layer = torch.nn.Module()
    layer.register_parameter(NAMES[0], None)
    assert nvfp4_weights.give_up_swizzled_scales(layer) == 0
    assert layer.w13_blockscale_swizzled is None
    assert not hasattr(layer, NAMES[1])
