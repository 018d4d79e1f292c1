"""Tests of fp4-weights on the engine's MXFP4 and NVFP4 methods: after a layer is loaded, the change frees the scales
that no kernel reads, and no other scales.

The layers are the engine's own ``FusedMoE``. The kernels that run them need a GPU, and stand-ins replace them.
"""

from __future__ import annotations

import functools
import importlib
import json
from types import SimpleNamespace
from typing import Any

import marlin_repack
import pytest
import torch
from architectures import CONFIGS
from conftest import installed
from safetensors.torch import save_file
from sglang_moe_patches.changes import fp4_weights
from sglang_moe_patches.changes.fp4_weights.unread import find_unread_scales

pytestmark = pytest.mark.every_release

EXPERTS, HIDDEN, INTERMEDIATE = 4, 128, 64
NAN_E8M0 = 255


def run_experts(dispatched, quant_info):
    """Stand-in for the kernels of the experts. It returns a result that depends on every byte of its tensors."""
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

    given = dict(vars(quant_info))
    for name in ("w13_precision_config", "w2_precision_config"):
        config = given.pop(name, None)
        given[name] = getattr(config, "weight_scale", getattr(config, "b_mx_scale", None))
    given = {name: getattr(getattr(value, "storage", None), "data", value) for name, value in given.items()}
    tensors = [given[name] for name in sorted(given) if isinstance(given[name], torch.Tensor)]
    assert len(tensors) >= 4, given
    sums = [t.contiguous().flatten().view(torch.uint8).double() for t in tensors]
    weighed = sum((place + 1) * (each * torch.arange(1, len(each) + 1)).sum() for place, each in enumerate(sums))
    return StandardCombineInput(hidden_states=dispatched.hidden_states + torch.frac(weighed / 1e7).float())


class Config:
    """Quantization configuration that returns the quantization method of a test."""

    def __init__(self, method):
        self.method = method

    group_size = 16

    def get_quant_method(self, layer, prefix):
        return self.method()

    def get_name(self):
        return "mxfp4"

    def is_static_cfg(self):
        return True


MXFP4 = ("triton_kernels", "gpt_oss_on_marlin", "deepseek_v4_on_marlin")


@pytest.fixture(params=MXFP4)
def mxfp4_kind(request, engine, monkeypatch):
    """Kind of MoE layer with MXFP4 weights (see :func:`make_kind`)."""
    return make_kind(request.param, engine, monkeypatch)


@pytest.fixture(params=[*MXFP4, "nvfp4_on_marlin", "nvfp4_on_trtllm"])
def any_kind(request, engine, monkeypatch):
    """Kind of MoE layer with MXFP4 or NVFP4 weights (see :func:`make_kind`)."""
    return make_kind(request.param, engine, monkeypatch)


@pytest.fixture(params=["triton_kernels", "deepseek_v4_on_marlin"])
def freeing_kind(request, engine, monkeypatch):
    """Kind of MoE layer (see :func:`make_kind`) whose unread scales fp4-weights frees. The test is skipped if the
    engine release deletes these scales itself.
    """
    kind = make_kind(request.param, engine, monkeypatch)
    return kind if kind.names else pytest.skip("this release deletes these scales itself")


def make_kind(name, engine, monkeypatch):
    """Prepare a kind of MoE layer: one of the engine's FP4 quantization methods, with the runner that it uses.

    The engine is patched as if it ran on a GPU that this method supports.

    :param name: one of :data:`MXFP4`, ``nvfp4_on_marlin`` or ``nvfp4_on_trtllm``.
    :returns: an object with these attributes. ``make`` is a function that builds a small layer of this kind. For NVFP4,
        ``create`` builds a layer of any size. ``names`` are the scales that the engine keeps although no kernel reads
        them.
    """
    from sglang.srt.layers.moe.utils import MoeRunnerBackend
    from sglang.srt.layers.quantization import marlin_utils, mxfp4

    if name.startswith("nvfp4"):
        return make_nvfp4(name, engine, monkeypatch)
    names: tuple[str, ...] = ("w13_weight_scale", "w2_weight_scale")
    backend, runs_on = "triton_kernel", MoeRunnerBackend.TRITON_KERNELS
    method = lambda: mxfp4.Mxfp4MoEMethod("experts")  # noqa: E731
    monkeypatch.setattr(mxfp4, "_is_cpu", False, raising=False)
    monkeypatch.setattr(mxfp4, "has_triton_kernels", True, raising=False)
    lay_out_as_on_hopper(monkeypatch)
    if name != "triton_kernels":
        reason = "this release runs no MXFP4 experts by Marlin"
        module = pytest.importorskip("sglang.srt.layers.quantization.mxfp4_marlin_moe", reason=reason)
        marlin_repack.replace_kernel(monkeypatch)
        monkeypatch.setattr(marlin_utils, "check_moe_marlin_supports_layer", lambda *args, **kwargs: True)
        for user in (module, mxfp4):
            monkeypatch.setattr(user, "is_sm90_supported", lambda: True, raising=False)
            monkeypatch.setattr(
                user,
                "get_platform",
                lambda: SimpleNamespace(is_sm90=True, is_sm100=False, is_sm120=False),
                raising=False,
            )
        backend, runs_on, names = "marlin", MoeRunnerBackend.MARLIN, ()
        if name == "deepseek_v4_on_marlin":
            fp8 = SimpleNamespace(process_weights_after_loading=lambda layer: None)
            method = lambda: module.Mxfp4MarlinMoEMethod(fp8, "experts")  # noqa: E731
            # The engine itself deletes these scales from 0.5.17 on.
            names = (
                ()
                if hasattr(module, "build_marlin_moe_quant_info")
                else ("w13_weight_scale_inv", "w2_weight_scale_inv")
            )

    return SimpleNamespace(make=lambda: make_layer(engine, method, backend, runs_on), names=names)


def lay_out_as_on_hopper(monkeypatch):
    """Make ``triton_kernels`` lay out weights as for a Hopper GPU."""
    from sglang.srt.layers.quantization import mxfp4

    layout = importlib.import_module("triton_kernels.tensor_details.layout")
    monkeypatch.setattr(layout, "cuda_capability_geq", lambda major, minor=0: major <= 9)
    hopper = SimpleNamespace(is_sm90=True, is_sm100=False, is_sm120=False, is_cuda=True, device_capability=(9, 0))
    monkeypatch.setattr(mxfp4, "get_platform", lambda: hopper, raising=False)


def make_nvfp4(name, engine, monkeypatch):
    from sglang.srt.layers.moe.utils import MoeRunnerBackend
    from sglang.srt.layers.quantization import modelopt_quant

    config = modelopt_quant.ModelOptFp4Config(is_checkpoint_nvfp4_serialized=True, group_size=16, exclude_modules=[])
    backend, runs_on = "flashinfer_trtllm", MoeRunnerBackend.FLASHINFER_TRTLLM
    names: tuple[str, ...] = ("w13_blockscale_swizzled", "w2_blockscale_swizzled")
    if name == "nvfp4_on_trtllm":
        # The engine itself frees these scales from 0.5.12 on.
        names = () if hasattr(modelopt_quant, "alias_or_bind_derived_param") else names
    else:
        marlin_repack.simulate_nvfp4_on_hopper(monkeypatch)
        backend, runs_on = "marlin", MoeRunnerBackend.MARLIN
    method = lambda: modelopt_quant.ModelOptNvFp4FusedMoEMethod(config)  # noqa: E731
    create = functools.partial(create_layer, engine, method, backend)
    return SimpleNamespace(make=lambda: make_layer(engine, method, backend, runs_on), create=create, names=names)


def create_layer(engine, method, backend, experts, hidden, intermediate):
    """Create a MoE layer as the engine does, before any weights are loaded."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    with engine.override_arguments(moe_runner_backend=backend):
        return FusedMoE(
            experts, hidden, intermediate, 0, top_k=1, quant_config=Config(method), params_dtype=torch.bfloat16
        )


def make_layer(engine, method, backend, runs_on):
    layer = create_layer(engine, method, backend, EXPERTS, HIDDEN, INTERMEDIATE)
    layer.quant_method.runner = SimpleNamespace(runner_backend=runs_on, run=run_experts, config=layer.moe_runner_config)
    for place, parameter in enumerate(layer.parameters()):  # values independent of other parameters' sizes
        generator = torch.Generator().manual_seed(place)
        parameter.data.copy_(torch.randint(1, 100, parameter.shape, generator=generator))
    return layer


def make_processed_layer(kind):
    layer = kind.make()
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def run_layer(layer):
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    tokens = torch.arange(2 * HIDDEN, dtype=torch.float32).reshape(2, HIDDEN)
    top_k = StandardTopKOutput(torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, EXPERTS))
    return layer.forward(tokens, top_k)


def parameters_read(layer):
    """Run a forward pass. Return the names of the layer's parameters that it reads."""
    read = set()
    original = torch.nn.Module.__getattr__

    def record_read(self, name):
        if self is layer and name in layer._parameters:
            read.add(name)
        return original(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "__getattr__", record_read)
        run_layer(layer)
    return read


def poison(layer, names):
    for name in names:
        value = getattr(layer, name).data
        value.reshape(-1).view(torch.uint8).fill_(NAN_E8M0)  # bytes of 255 are a NaN in float32, too


def test_unread_scales_take_no_memory_and_the_answer_is_the_same(any_kind):
    stock = make_processed_layer(any_kind)
    expected = run_layer(stock)
    with installed(fp4_weights.CHANGE):
        ours = make_processed_layer(any_kind)
    assert torch.equal(run_layer(ours), expected)
    read = parameters_read(ours)
    assert not read & {*any_kind.names}
    left = {name for name, value in ours.named_parameters() if "bias" not in name and value.nbytes > EXPERTS * 8}
    assert left <= read
    assert {name for name, value in stock.named_parameters() if value.shape != getattr(ours, name).shape} == {
        *any_kind.names
    }
    assert [getattr(ours, name).shape for name in any_kind.names] == [(EXPERTS, 1, 1)] * len(any_kind.names)
    for layer in (stock, ours):
        poison(layer, any_kind.names)
        assert torch.equal(run_layer(layer), expected)
    for name in sorted(read):  # a change of any parameter that the kernels read changes the answer
        layer = make_processed_layer(any_kind)
        poison(layer, [name])
        assert not torch.equal(run_layer(layer), expected)


@pytest.mark.parametrize("name", ["gpt_oss_on_marlin", "deepseek_v4_on_marlin", "nvfp4_on_marlin"])
def test_marlins_repacked_weights_lie_in_the_memory_of_the_loaded_weights(engine, monkeypatch, name):
    """The repacked weights are written over the loaded weights. The change may do so, because only the layer refers to
    the loaded weights.
    """
    any_kind = make_kind(name, engine, monkeypatch)
    with installed(fp4_weights.CHANGE):
        layer = any_kind.make()
        places = [layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()]
        layer.quant_method.process_weights_after_loading(layer)
    assert [layer.w13_weight.dtype, layer.w2_weight.dtype] == [torch.int32] * 2
    assert [layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()] == places


def test_zeros_follow_the_scales_on_hopper(engine, monkeypatch):
    """Hopper's kernels read 128 bytes of a row at once. The rows of w2's scales have 64 bytes, so a kernel also
    reads the 64 bytes after the last row. These bytes must be zero.
    """
    triton_kernels = make_kind("triton_kernels", engine, monkeypatch)

    def scales():
        method = make_processed_layer(triton_kernels).quant_method
        configs = (method.w13_precision_config, method.w2_precision_config)
        found = [getattr(each, "weight_scale", None) or each.b_mx_scale for each in configs]
        assert [each.storage.layout.name for each in found] == ["HOPPER_SCALE"] * 2
        return [each.storage.data for each in found]

    stock = scales()
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory with 255
    try:
        with installed(fp4_weights.CHANGE):
            ours = scales()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(
        torch.equal(patched_tensor, stock_tensor) and patched_tensor.stride() == stock_tensor.stride()
        for patched_tensor, stock_tensor in zip(ours, stock, strict=True)
    )
    rows = [each.shape[1] for each in ours]
    assert rows in ([128, 64], [128, 128])  # the engine pads the rows of w2's scales from 0.5.23 on
    whole = [torch.empty(0, dtype=torch.uint8).set_(each.untyped_storage()) for each in ours]
    after_rows = [memory[scale.numel() :].tolist() for memory, scale in zip(whole, ours, strict=True)]
    assert after_rows == [[], [0] * (128 - rows[1])]


def test_unread_scales_are_named_or_a_reason_is_given(mxfp4_kind):
    layer = make_processed_layer(mxfp4_kind)
    sizes = {name: getattr(layer, name).nbytes for name in mxfp4_kind.names}
    reason = "" if sizes else f"{type(layer.quant_method).__name__} reads all of its scales"
    assert find_unread_scales(layer) == (sizes, reason)
    layer._mega_moe_weights_built = True
    assert find_unread_scales(layer) == ({}, "DeepGEMM's mega kernel runs the layer's experts")


READS = "use(layer.{0}, layer.{1})"
NEWER = {
    "apply: quiet(layer)": "",  # empty: the change frees the scales
    "apply: if nothing(): use(layer.{0}, layer.{1})": "",
    f"apply: {READS}": "reads all of its scales",
    "apply: if unknown(): use(layer.{0}, layer.{1})": "reads all of its scales",
    "apply: if self.switched: use(layer.{0}, layer.{1})": "reads all of its scales",
    "apply: if self.switched is None or other(): use(layer.{0}, layer.{1})": "reads all of its scales",
    "apply: flag = None\n    (flag := other())\n    if flag: use(layer.{0}, layer.{1})": "reads all of its scales",
    "apply: use(getattr(layer, '{0}'), getattr(layer, '{1}', None))": "reads all of its scales",
    "apply: helper(layer)": "reads all of its scales",
    "apply: self.kept = layer": "may store a reference to its layer",
    "apply: layer.named_parameters()": "uses its layer's method or property named_parameters",
    "apply: layer._parameters['{0}']": "reads its layer's _parameters",
    "apply: getattr(layer, name())": "by computed names",
    "apply: [f(layer) for f in self.hooks]": "passes its layer to f",
    "apply: wrapped(layer)": "wrapped",
    f"get_marlin_quant_info: {READS}": "reads all of its scales",
    f"forward of the layer: {READS}": "reads all of its scales",
    f"another function of the layer: {READS}": "reads all of its scales",
    "runner: keeps a reference to its layer": "keeps a reference to its layer",
    "partial: keeps a reference to its layer": "keeps a reference to its layer",
    "closure: keeps a reference to its layer": "keeps a reference to its layer",
    "bound method of the layer: keeps a reference to its layer": "keeps a reference to its layer",
    "list of partials: keeps a reference to its layer": "keeps a reference to its layer",
    f"apply of the instance: {READS}": "an instance of Newer replaces its class's apply",
    f"forward of the layer's instance: {READS}": "an instance of Newer replaces its class's forward",
}


@pytest.mark.parametrize("change", NEWER)
def test_scales_that_a_newer_release_may_read_stay(freeing_kind, tmp_path, change):
    layer = make_processed_layer(freeing_kind)
    where, _, statement = change.format(*freeing_kind.names).partition(": ")
    source = f"""
import functools
def nothing():
    return False
def helper(layer):
    return use(layer.{freeing_kind.names[0]}, layer.{freeing_kind.names[1]})
def quiet(layer):
    return layer.w13_weight_bias
@functools.wraps(quiet)
def wrapped(*args):
    return helper(*args)
def function(self, layer, dispatch_output=None):
    {"pass" if statement.startswith("keeps") else statement}
    return self.runner.run(dispatch_output, None)
def apply(self, layer, dispatch_output):
    return self.runner.run(dispatch_output, quiet(layer))
def set_switch(self):
    self.switched = True
"""
    (tmp_path / "newer.py").write_text(source)
    namespace: dict[str, Any] = {"__name__": "sglang.newer"}
    exec(compile(source, str(tmp_path / "newer.py"), "exec"), namespace)
    of_method = {"apply": namespace["apply"], "switched": None, "set_switch": namespace["set_switch"]}
    of_layer = {}
    match where:
        case "forward of the layer":
            of_layer["forward"] = namespace["function"]
        case "another function of the layer":
            of_layer["late"] = namespace["function"]
        case "runner":
            layer.quant_method.runner.layer = layer
        case "partial":
            layer.quant_method.hook = functools.partial(namespace["helper"], layer)
        case "closure":
            layer.quant_method.hook = lambda: namespace["helper"](layer)
        case "bound method of the layer":
            layer.quant_method.hook = layer.forward
        case "list of partials":
            layer.quant_method.runner.hooks = [functools.partial(namespace["helper"], layer=layer)]
        case "apply of the instance":
            layer.quant_method.apply = namespace["function"].__get__(layer.quant_method)
        case "forward of the layer's instance":
            layer.forward = namespace["function"].__get__(layer)
        case _:
            of_method |= {where: namespace["function"]}
    bases = type(layer.quant_method).__mro__[1:2]  # leaves out the functions that the engine's apply calls
    for owner, base, functions in ((layer.quant_method, bases, of_method), (layer, (type(layer),), of_layer)):
        owner.__class__ = type("Newer", base, {"__module__": "sglang.newer"} | functions)
    unread = find_unread_scales(layer)
    assert unread.bytes_of.keys() & {*freeing_kind.names} == (set() if NEWER[change] else {*freeing_kind.names})
    assert unread.bytes_of or NEWER[change] in unread.reason


def test_a_scale_whose_memory_is_read_is_not_counted(freeing_kind):
    layer = make_processed_layer(freeing_kind)
    alias = getattr(layer, freeing_kind.names[0]).data
    other = getattr(layer, freeing_kind.names[1]).nbytes
    assert fp4_weights.free_unread_scales(layer) == other
    assert alias.view(torch.uint8).sum() > 0


def test_a_weight_update_ends_as_on_the_stock_server(any_kind):
    def update(layer):
        outcomes = []
        shapes = ((EXPERTS, 2 * INTERMEDIATE, HIDDEN // 32), (EXPERTS, HIDDEN, INTERMEDIATE // 32), (5, 5))
        for name in ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale", *any_kind.names):
            for shape in shapes:
                try:
                    parameter = dict(layer.named_parameters())[name]
                    parameter.weight_loader(parameter, torch.ones(shape, dtype=torch.uint8), name, None, None)
                    outcomes.append("loaded")
                except Exception as error:
                    outcomes.append(f"{type(error).__name__}: {error}")
        try:
            layer.quant_method.process_weights_after_loading(layer)
            outcomes.append("processed")
        except Exception as error:
            outcomes.append(f"{type(error).__name__}: {error}")
        return outcomes, run_layer(layer)

    stock, expected = update(make_processed_layer(any_kind))
    with installed(fp4_weights.CHANGE):
        ours, given = update(make_processed_layer(any_kind))
    assert stock == ours
    assert torch.equal(given, expected)
    assert "loaded" in stock or not any(name.endswith(("_scale", "_inv")) for name in any_kind.names)


@pytest.fixture
def gpt_oss(engine, monkeypatch, tmp_path):
    """Two functions. ``load`` builds gpt-oss with the engine's MXFP4 experts. ``update`` loads a weight update from a
    file, and returns the engine's answer.
    """
    from sglang.srt.configs import load_config
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers import quantization
    from sglang.srt.layers.quantization import mxfp4

    make_kind("triton_kernels", engine, monkeypatch)
    monkeypatch.setitem(quantization.QUANTIZATION_METHODS, "mxfp4", mxfp4.Mxfp4Config)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    config = CONFIGS["gpt-oss"] | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(ModelConfig, "_verify_quantization", lambda self: setattr(self, "quantization", "mxfp4"))
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]

    def load():
        with engine.override_arguments(moe_runner_backend="triton_kernel"), monkeypatch.context() as patch:
            patch.setattr(load_config, "LoadConfig", lambda **how: LoadConfig(**{**how, "load_format": "dummy"}))
            return engine.load(tmp_path)

    def update(model, parts):
        tensors: dict[str, torch.Tensor] = {}
        for layer in range(config["num_hidden_layers"]):
            for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
                own = f"model.layers.{layer}.mlp.experts.{name}"
                blocks = torch.ones(experts, rows, columns // 32, 16, dtype=torch.uint8)
                scales = torch.ones(experts, rows, columns // 32, dtype=torch.uint8)
                whole = {"bias": torch.ones(experts, rows).bfloat16(), "blocks": blocks, "scales": scales}
                tensors |= {f"{own}_{part}": whole[part] for part in parts}
        save_file(tensors, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
        engine.runner.model, dtype = model, torch.get_default_dtype()
        updater = getattr(engine.runner, "weight_updater", engine.runner)
        try:
            with engine.override_arguments(moe_runner_backend="triton_kernel"):
                return updater.update_weights_from_disk(str(tmp_path), "auto")
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            torch.set_default_dtype(dtype)

    return SimpleNamespace(load=load, update=update)


@pytest.mark.parametrize("parts", [("bias", "blocks", "scales"), ("scales",), ("bias", "scales")])
def test_an_update_of_gpt_oss_by_request_ends_as_on_the_stock_server(gpt_oss, parts):
    def outcome():
        model = gpt_oss.load()
        answer = gpt_oss.update(model, parts)
        experts = model.model.layers[0].mlp.experts
        kept = {name: value.clone() for name, value in experts.named_parameters() if not name.endswith("_scale")}
        return answer, kept, experts.w13_weight_scale.nbytes

    stock = outcome()
    with installed(fp4_weights.CHANGE):
        ours = outcome()
    assert stock[0] == ours[0]
    assert "Error" in stock[0]  # the loaded weights no longer exist, and the biases have no weight loader
    assert stock[1].keys() == ours[1].keys()
    assert all(torch.equal(stock[1][name], ours[1][name]) for name in stock[1])
    assert ours[2] < stock[2]
