"""Tests of fp4-weights on the engine's own loading path. Parameters and answers are equal to the stock engine's, also
after a weight update.
"""

from __future__ import annotations

from types import SimpleNamespace

import marlin_repack
import pytest
import torch
from conftest import installed
from sglang_moe_patches.changes import fp4_weights
from sglang_moe_patches.core.patch import Plan

pytestmark = pytest.mark.every_release

PROMPTS = [[11, 7, 300, 42] * 9, list(range(40, 140))]
PLACEHOLDERS = ("w13_blockscale_swizzled", "w2_blockscale_swizzled")


def parameters(model):
    """Return a copy of the bytes of every parameter that a kernel reads."""
    return {
        name: parameter.detach().flatten().view(torch.uint8).clone()
        for name, parameter in model.named_parameters()
        if not name.endswith(PLACEHOLDERS)
    }


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def update(engine, model, path):
    """Update a model's weights from a checkpoint, as a request to the server does. The engine must report success."""
    runner = engine.runner
    runner.model = model
    updater = getattr(runner, "weight_updater", runner)  # newer releases have a component for updates
    done, message = updater.update_weights_from_disk(str(path), "auto")
    assert done, message


@pytest.mark.compatibility
def test_a_loaded_and_an_updated_model_are_those_of_the_stock_engine(engine, checkpoint):
    first, second = checkpoint(), checkpoint(seed=1)

    def load_then_update():
        model = engine.load(first)
        states = [(parameters(model), engine.generate(model, PROMPTS, 2))]
        for path in (second, first):
            update(engine, model, path)
            states.append((parameters(model), engine.generate(model, PROMPTS, 2)))
        return states

    stock = load_then_update()
    assert stock[0][1][0] != stock[1][1][0]  # the two checkpoints give different answers
    with installed(fp4_weights.CHANGE):
        patched = load_then_update()
    for (stock_parameters, stock_answers), (our_parameters, our_answers) in zip(stock, patched, strict=True):
        assert_same(stock_parameters, our_parameters)
        assert stock_answers[0] == our_answers[0]
        assert torch.equal(stock_answers[1], our_answers[1])


def test_two_swapped_rows_would_be_seen(engine, checkpoint):
    model = engine.load(checkpoint())
    right = engine.generate(model, PROMPTS, 0)[1]
    for tensor in ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"):
        rows = getattr(model.model.layers[1].mlp.experts, tensor).data.view(torch.uint8)
        rows[:, [0, 1]] = rows[:, [1, 0]]
        assert not torch.equal(engine.generate(model, PROMPTS, 0)[1], right), tensor
        rows[:, [0, 1]] = rows[:, [1, 0]]


def scale_bytes(experts):
    """Return the bytes of a layer's swizzled block scales."""
    scales = [getattr(experts, name) for name in PLACEHOLDERS]
    return sum(0 if one is None else one.nbytes for one in scales)


SCALES = 8 * (256 * 16 + 256 * 8)  # 8 experts: w13 has 256 rows of 16 scales, w2 has 256 rows of 8


def scale_bytes_while_loading(engine, path):
    """Load a checkpoint. Return the bytes of each layer's swizzled scales just before the engine lays out its
    weights.
    """
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4FusedMoEMethod as Method

    seen, original = [], Method.process_weights_after_loading

    def process(self, layer):
        seen.append(scale_bytes(layer))
        return original(self, layer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Method, "process_weights_after_loading", process)
        engine.load(path)
    return seen


def test_placeholders_are_not_allocated(engine, checkpoint):
    stock = scale_bytes_while_loading(engine, checkpoint())
    assert stock in ([SCALES] * 3, [0] * 3)  # 0 from 0.5.13 on
    with installed(fp4_weights.CHANGE):
        assert scale_bytes_while_loading(engine, checkpoint()) == ([2 * 8] * 3 if stock[0] else [0] * 3)


@pytest.fixture
def marlin(engine, monkeypatch):
    """Make the engine run NVFP4 experts on Marlin, as on a Hopper GPU. A stand-in replaces Marlin's repacking kernel,
    which needs a GPU.

    :returns: list to which each call of the stand-in adds the number of earlier results that still exist.
    """
    return marlin_repack.simulate_nvfp4_on_hopper(monkeypatch)


@pytest.mark.parametrize("backend", ["auto", "marlin"])
def test_marlin_keeps_no_scales_that_it_never_reads_and_no_list_of_experts(engine, checkpoint, marlin, backend):
    def load_then_update():
        with engine.override_arguments(moe_runner_backend=backend):
            model = engine.load(checkpoint())
            layers = [layer.mlp.experts for layer in model.model.layers if hasattr(layer.mlp, "experts")]
            state = parameters(model), [scale_bytes(experts) for experts in layers]
            other, dtype = checkpoint(seed=1), torch.get_default_dtype()
            try:
                update(engine, model, other)
                outcome = "updated"
            except Exception as error:  # the repacked parameters have no weight loader
                outcome = f"{type(error).__name__}: {error}"
            finally:
                torch.set_default_dtype(dtype)  # before 0.5.18 a failed update leaves the model's dtype as default
        return *state, outcome, parameters(model)

    stock = load_then_update()
    assert stock[1] == [SCALES] * 3  # stock never frees them
    assert max(marlin) >= 7  # when stock repacks the last of 8 experts, 7 results exist
    marlin.clear()
    with installed(fp4_weights.CHANGE):
        patched = load_then_update()
    assert {*marlin} == {0}
    assert patched[1] == [2 * 8] * 3
    assert_same(stock[0], patched[0])
    assert stock[2] == patched[2]
    assert_same(stock[3], patched[3])


@pytest.mark.usefixtures("marlin")
def test_scales_that_another_kernel_reads_stay(engine, checkpoint):
    """If the server's arguments choose another kernel than Marlin on a Hopper GPU, a layer's swizzled scales stay
    allocated, because the other kernel reads them. The change must not assume that every Hopper GPU runs Marlin.
    """
    with installed(fp4_weights.CHANGE), engine.override_arguments(moe_runner_backend="flashinfer_cutlass"):
        assert scale_bytes_while_loading(engine, checkpoint()) == [SCALES] * 3


def test_the_change_is_applied_on_hopper_if_the_release_serves_nvfp4_there(monkeypatch, patcher):
    """On a Hopper GPU, the change patches the engine's NVFP4 method only if the engine release serves NVFP4 models on
    Hopper. A release serves them if it can prepare NVFP4 layers for Marlin.
    """
    from sglang.srt.layers.quantization import modelopt_quant
    from sglang_moe_patches.core.patch import Status

    monkeypatch.setattr(modelopt_quant, "is_cuda", lambda: True)
    assert fp4_weights.CHANGE.plan().status is Status.APPLIED  # the tests' environment disables the check for Blackwell
    if hasattr(modelopt_quant, "get_platform"):
        monkeypatch.setattr(modelopt_quant, "get_platform", lambda: SimpleNamespace(is_blackwell=False))
    else:
        monkeypatch.setattr(modelopt_quant, "is_blackwell_supported", lambda: False)
    plan = fp4_weights.CHANGE.plan()
    nvfp4 = ["create_moe_runner"]
    if not hasattr(modelopt_quant, "prepare_moe_nvfp4_layer_for_marlin"):
        assert fp4_weights._plan_nvfp4() == Plan.not_needed("this release serves NVFP4 experts on Blackwell alone")
        nvfp4 = []
    assert plan.status is Status.APPLIED
    plan.install(patcher)
    of_mxfp4 = {"process_weights_after_loading", "_swizzle_mxfp4", "create_weights"}
    touched = [name for _, name, _ in patcher._originals]
    assert [name for name in touched if name not in of_mxfp4] == nvfp4
