"""nvfp4-weights on the engine's own loading path: same parameters, same answers, also after a weight update."""

from __future__ import annotations

import pytest
import torch
from conftest import installed
from sglang_moe_patches.changes import nvfp4_weights

pytestmark = pytest.mark.every_release

PROMPTS = [[11, 7, 300, 42] * 9, list(range(40, 140))]
PLACEHOLDERS = ("w13_blockscale_swizzled", "w2_blockscale_swizzled")


def parameters(model):
    """The bytes of every parameter that a kernel reads."""
    return {
        name: parameter.detach().flatten().view(torch.uint8).clone()
        for name, parameter in model.named_parameters()
        if not name.endswith(PLACEHOLDERS)
    }


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def update(engine, model, path):
    """The engine's answer to a weight-update request."""
    runner = engine.runner
    runner.model = model
    updater = getattr(runner, "weight_updater", runner)  # a component of its own in newer releases
    done, message = updater.update_weights_from_disk(str(path), "auto")
    assert done, message


@pytest.mark.compatibility
def test_a_loaded_and_an_updated_model_are_those_of_the_stock_engine(engine, checkpoint):
    first, second = checkpoint(), checkpoint(seed=1)

    def load_then_update():
        model = engine.load(first)
        states = [(parameters(model), engine.generate(model, PROMPTS, 4))]
        for path in (second, first):
            update(engine, model, path)
            states.append((parameters(model), engine.generate(model, PROMPTS, 4)))
        return states

    stock = load_then_update()
    assert stock[0][1][0] != stock[1][1][0]  # the other checkpoint answers differently
    with installed(nvfp4_weights.CHANGE):
        patched = load_then_update()
    for (stock_parameters, stock_answers), (our_parameters, our_answers) in zip(stock, patched, strict=True):
        assert_same(stock_parameters, our_parameters)
        assert stock_answers[0] == our_answers[0]
        assert torch.equal(stock_answers[1], our_answers[1])


@pytest.mark.parametrize("tensor", ["w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"])
def test_two_swapped_rows_would_be_seen(engine, checkpoint, tensor):
    model = engine.load(checkpoint())
    right = engine.generate(model, PROMPTS, 4)
    experts = model.model.layers[1].mlp.experts
    rows = getattr(experts, tensor).data.view(torch.uint8)
    rows[:, [0, 1]] = rows[:, [1, 0]]
    assert not torch.equal(engine.generate(model, PROMPTS, 4)[1], right[1])


def test_placeholders_are_not_allocated(engine, checkpoint):
    def bytes_of_placeholders():
        """While loading, before the engine replaces them."""
        seen = []
        from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4FusedMoEMethod as Method

        original = Method.process_weights_after_loading

        def process(self, layer):
            placeholders = [getattr(layer, name) for name in PLACEHOLDERS]
            seen.append(sum(0 if placeholder is None else placeholder.nbytes for placeholder in placeholders))
            return original(self, layer)

        Method.process_weights_after_loading = process
        try:
            engine.load(checkpoint())
        finally:
            Method.process_weights_after_loading = original
        return seen

    scales = 8 * (256 * 16 + 256 * 8)  # experts x (w13: 256 rows of 16 scales, w2: 256 rows of 8)
    stock = bytes_of_placeholders()
    assert stock in ([scales] * 3, [0] * 3)  # none from 0.5.13 on
    with installed(nvfp4_weights.CHANGE):
        assert bytes_of_placeholders() == ([2 * 8] * 3 if stock[0] else [0] * 3)
