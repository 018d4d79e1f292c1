"""Tests of fp4-weights on the engine's own functions that repack FP4 experts for Marlin.

The repacked weights have the same bits as the engine's, and lie in the memory of the loaded weights.
"""

from __future__ import annotations

import inspect
import linecache
from types import FunctionType, SimpleNamespace

import marlin_repack
import pytest
import torch
from conftest import installed
from sglang_moe_patches.changes import fp4_weights
from sglang_moe_patches.changes.fp4_weights import repack
from sglang_moe_patches.core import engine as engine_code
from sglang_moe_patches.core.patch import Status, probe

pytestmark = [pytest.mark.every_release, pytest.mark.usefixtures("engine")]

MXFP4, NVFP4 = "prepare_moe_mxfp4_layer_for_marlin", "prepare_moe_nvfp4_layer_for_marlin"
#: Shapes of the tested layers: experts on this rank, hidden size, intermediate size on this rank, whether the
#: activation is gated, whether the experts have biases.
SHAPES = {
    "all experts": (8, 128, 64, True, False),
    "biases": (8, 128, 64, True, True),
    "an uneven share of experts": (3, 256, 128, True, True),
    "one expert": (1, 128, 64, True, False),
    "a share of each expert that the engine pads": (4, 128, 96, True, True),
    "not gated": (4, 128, 128, False, False),
    "not gated, biases, padded": (4, 128, 96, False, True),
}


@pytest.fixture
def earlier_results(monkeypatch):
    """List with one number for each call of the repacking kernel: the count of earlier results that are still
    allocated when the call begins. A stand-in replaces the engine's kernel.
    """
    pytest.importorskip(fp4_weights._MARLIN_UTILS, reason="this release runs no FP4 experts by Marlin")
    return marlin_repack.replace_kernel(monkeypatch)


@pytest.fixture(params=[MXFP4, NVFP4])
def name(request, earlier_results):
    """Name of the engine's function that prepares a layer's FP4 experts for Marlin: :data:`MXFP4` or :data:`NVFP4`."""
    if not hasattr(engine_code.import_module(fp4_weights._MARLIN_UTILS), request.param):
        pytest.skip("this release runs no NVFP4 experts by Marlin")
    return request.param


def make_loaded_layer(name, shape):
    """Return a layer of routed experts as it is after loading a checkpoint, before the engine repacks it."""
    experts, hidden, inner, gated, biased = shape
    rows = inner * (2 if gated else 1)
    group, scale = (32, torch.uint8) if name == MXFP4 else (16, torch.float8_e4m3fn)
    generator = torch.Generator().manual_seed(0)

    def make_random_bytes(*size):
        return torch.randint(0, 127, (experts, *size), generator=generator, dtype=torch.uint8)

    weights = {
        "w13_weight": make_random_bytes(rows, hidden // 2),
        "w2_weight": make_random_bytes(hidden, inner // 2),
        "w13_weight_scale": make_random_bytes(rows, hidden // group).view(scale),
        "w2_weight_scale": make_random_bytes(hidden, inner // group).view(scale),
    }
    if name == NVFP4:
        weights |= {f"{each}_weight_scale_2": make_random_bytes().float() for each in ("w13", "w2")}
    if biased:
        word = "bias" if name == NVFP4 else "weight_bias"
        weights |= {
            f"w13_{word}": make_random_bytes(rows).bfloat16(),
            f"w2_{word}": make_random_bytes(hidden).bfloat16(),
        }
    layer = torch.nn.Module()
    for each, value in weights.items():
        layer.register_parameter(each, torch.nn.Parameter(value, requires_grad=False))
    layer.quant_config = SimpleNamespace(group_size=16)
    layer.moe_runner_config = SimpleNamespace(is_gated=gated)
    layer.intermediate_size_per_partition, layer.params_dtype = inner, torch.bfloat16
    return layer


def prepare(name, layer):
    """Run the engine's function that prepares a layer for Marlin. Return the layer's parameters, or the text of the
    engine's error.
    """
    try:
        getattr(engine_code.import_module(fp4_weights._MARLIN_UTILS), name)(layer)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return {each: value.data for each, value in layer.named_parameters()}


def assert_same(stock, ours):
    assert stock.keys() == ours.keys()
    for each, value in stock.items():
        assert (value.dtype, value.shape) == (ours[each].dtype, ours[each].shape)
        assert torch.equal(value.contiguous().view(torch.uint8), ours[each].contiguous().view(torch.uint8)), each


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_experts_are_repacked_in_place_with_the_same_bits(name, earlier_results, shape):
    """With the change, each result of the repacking kernel is written over the loaded weights. So at each call of the
    kernel, no earlier result has memory of its own. In the stock engine, earlier results have memory of their own.
    """
    stock = prepare(name, make_loaded_layer(name, shape))
    assert max(earlier_results, default=0) >= shape[0] - 1 or isinstance(stock, str)
    earlier_results.clear()
    layer = make_loaded_layer(name, shape)
    sizes = [getattr(layer, each).nbytes for each in repack.WEIGHTS]
    places = [getattr(layer, each).data_ptr() for each in repack.WEIGHTS]
    with installed(fp4_weights.CHANGE):
        ours = prepare(name, layer)
    if isinstance(stock, str):  # this release cannot repack this shape
        assert ours == stock
        return
    assert_same(stock, ours)
    assert earlier_results == [0] * 2 * shape[0]
    repacked = [ours[each] for each in repack.WEIGHTS]
    padded = sizes != [value.nbytes for value in repacked]
    assert padded or places == [value.data_ptr() for value in repacked]
    for value in repacked:
        assert type(value) is torch.Tensor
        assert value.untyped_storage().nbytes() == value.nbytes


HOLDERS = {
    "the parameter": lambda weight: weight,
    "its memory": lambda weight: weight.data,
    "one expert": lambda weight: weight[1],
    "a list": lambda weight: [weight],
}


@pytest.mark.parametrize("which", repack.WEIGHTS)
@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_weights_with_another_reference_are_not_repacked_in_place(name, hold, which):
    shape = SHAPES["biases"] if name == MXFP4 else SHAPES["not gated"]
    stock = prepare(name, make_loaded_layer(name, shape))
    layer = make_loaded_layer(name, shape)
    before = getattr(layer, which).detach().clone()
    held = hold(getattr(layer, which))
    with installed(fp4_weights.CHANGE):
        ours = prepare(name, layer)
    assert_same(stock, ours)
    (held,) = held if isinstance(held, list) else (held,)
    assert torch.equal(held, before[1] if held.ndim < before.ndim else before)


def test_a_layer_that_is_refused_ends_as_on_the_stock_server(name):
    def prepare_refused_layer():
        layer = make_loaded_layer(name, SHAPES["biases"])
        layer.w2_weight = torch.nn.Parameter(layer.w2_weight[:, :-1].clone(), requires_grad=False)
        return prepare(name, layer)

    stock = prepare_refused_layer()
    with installed(fp4_weights.CHANGE):
        assert isinstance(stock, str)
        assert prepare_refused_layer() == stock


def test_a_hook_point_of_another_plugin_is_left_alone(name, monkeypatch):
    utils = engine_code.import_module(fp4_weights._MARLIN_UTILS)
    places = [(utils, name), (utils, "gptq_marlin_repack")]
    places += [(module, name) for module in [engine_code.import_module(fp4_weights._MODELOPT)] if hasattr(module, name)]
    for owner, attribute in places:
        original = getattr(owner, attribute)
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, lambda *args, original=original, **kwargs: original(*args, **kwargs))
            plan = probe(fp4_weights.CHANGE)
        assert (plan.status, plan.install) == (Status.UNSUPPORTED, None), attribute
        assert f"{attribute} is wrapped or replaced by" in plan.reason
    assert probe(fp4_weights.CHANGE).install is not None


def compile_replacement(function, tmp_path, source):
    """Compile ``source`` and return the function that it defines, with the name and the globals of ``function``.

    :param function: one of the engine's functions.
    :param source: changed source code of ``function``, such as a newer release may have.
    """
    path = tmp_path / f"{function.__name__}.py"
    path.write_text(source)
    linecache.checkcache(str(path))
    functions: dict[str, FunctionType] = {}
    exec(compile(source, str(path), "exec"), function.__globals__, functions)
    return functions[function.__name__]


def repacking_functions():
    """Return the engine's functions that prepare or repack a layer's experts. The key is the function's name."""
    utils = engine_code.import_module(fp4_weights._MARLIN_UTILS)
    names = (MXFP4, NVFP4, fp4_weights._REPACK_EXPERTS)
    return {each: getattr(utils, each) for each in names if hasattr(utils, each)}


def change_repacking_source(monkeypatch, tmp_path, old, new):
    """Replace the text ``old`` by ``new`` in the source code of the engine's repacking functions."""
    utils = engine_code.import_module(fp4_weights._MARLIN_UTILS)
    for each, function in repacking_functions().items():
        source = inspect.getsource(function)
        if old in source:
            monkeypatch.setattr(utils, each, compile_replacement(function, tmp_path, source.replace(old, new)))


ORDERS = {
    "the last expert first": ("in range(num_experts)", "in reversed(range(num_experts))"),
    "a list that is turned round": ("torch.stack(tensor_list)", "torch.stack(tensor_list[::-1])"),
}


@pytest.mark.parametrize("edit", ORDERS.values(), ids=ORDERS)
def test_experts_repacked_in_another_order_are_stacked_by_the_engine(name, monkeypatch, tmp_path, edit):
    change_repacking_source(monkeypatch, tmp_path, *edit)
    stock = prepare(name, make_loaded_layer(name, SHAPES["not gated" if name == NVFP4 else "biases"]))
    assert isinstance(stock, dict)
    with installed(fp4_weights.CHANGE):
        assert_same(stock, prepare(name, make_loaded_layer(name, SHAPES["not gated" if name == NVFP4 else "biases"])))


#: Edits of the engine's repacking function, as newer releases might make them, each with the reason why the change then
#: does nothing. A text is appended to the function. A pair is a text of the function and its replacement.
NEWER = {
    "layer.workspace = w13[0]\n": "reads w13 again",
    "layer.workspace = layer.w2_weight[0]\n": "reads w2_weight again",
    "remember(layer)\n": "reads the layer by remember again",
    "_repack_weight(w2_bias, False)\n_repack_moe_fp4_weight_for_marlin(w2_bias, perm)\n": "repacks w13, w2, w2_bias",
    ("if bias is None:", "if w13 is None:"): "reads w13 again",
}


@pytest.mark.parametrize("change", NEWER, ids=NEWER.values())
def test_weights_that_a_newer_release_reads_again_are_not_overwritten(name, tmp_path, change):
    function, helper = repacking_functions()[name], repacking_functions().get(fp4_weights._REPACK_EXPERTS)
    source = inspect.getsource(function)
    if isinstance(change, tuple):
        source = source.replace(*change)
    else:
        source += "".join(f"    {line}\n" for line in change.splitlines())
    repack.require_last_use(function, helper)
    with pytest.raises(engine_code.Unsupported, match=NEWER[change]):
        repack.require_last_use(compile_replacement(function, tmp_path, source), helper)


def test_an_expert_that_a_newer_release_reads_twice_is_not_overwritten(monkeypatch, tmp_path, name):
    change_repacking_source(
        monkeypatch, tmp_path, "tensor_list.append(marlin_qweight)", "tensor_list.append(weight[i])"
    )
    plan = probe(fp4_weights.CHANGE)
    assert (plan.status, plan.install) == (Status.UNSUPPORTED, None)
    assert "reads weight otherwise" in plan.reason


@pytest.mark.usefixtures("earlier_results")
def test_a_release_that_stacks_no_list_is_left_alone(monkeypatch, tmp_path):
    assert fp4_weights._probe_repack() is not None
    change_repacking_source(monkeypatch, tmp_path, "torch.stack(", "torch.cat(")
    assert fp4_weights._probe_repack() is None
