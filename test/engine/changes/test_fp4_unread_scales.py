"""fp4-weights on MXFP4's own methods: scales that ``apply`` never reads are given up after loading, and no others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from conftest import installed
from sglang_moe_patches.changes import fp4_weights
from sglang_moe_patches.changes.fp4_weights.unread import unread_scales

EXPERTS, HIDDEN, INTERMEDIATE = 3, 128, 64


def load(parameter, loaded, *args):
    parameter.data.copy_(loaded)


class Layer(torch.nn.Module):
    def __init__(self, method):
        super().__init__()
        self.quant_method, self.num_local_experts, self.hidden_size, self.moe_ep_size = method, EXPERTS, HIDDEN, 1
        self.dispatcher = SimpleNamespace(num_experts=EXPERTS)
        method.create_weights(self, EXPERTS, HIDDEN, INTERMEDIATE, torch.bfloat16, weight_loader=load)
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randint(1, 100, parameter.shape, generator=generator))


@pytest.fixture(params=["triton_kernels", "deepseek_v4"])
def kind(request, engine, monkeypatch):
    """A method of the engine, made anew by each call; what its kernels need of a GPU only moves bytes."""
    from sglang.srt.layers.moe.utils import MoeRunnerBackend
    from sglang.srt.layers.quantization import mxfp4

    def run(dispatched, quant_info):
        return SimpleNamespace(hidden_states=quant_info)

    if request.param == "triton_kernels":
        monkeypatch.setattr(mxfp4, "_is_cpu", False, raising=False)
        monkeypatch.setattr(mxfp4, "has_triton_kernels", True, raising=False)
        monkeypatch.setattr(
            mxfp4, "_swizzle_mxfp4", lambda weight, scale, warps: (weight.data.clone(), None, scale.data.clone())
        )

        def make():
            with engine.arguments(moe_runner_backend="triton_kernel"):
                method = mxfp4.Mxfp4MoEMethod("experts")
            method.use_triton_kernels = True
            method.runner = SimpleNamespace(runner_backend=MoeRunnerBackend.TRITON_KERNELS, run=run)
            return method

        return SimpleNamespace(make=make, names=("w13_weight_scale", "w2_weight_scale"))

    module = pytest.importorskip(
        "sglang.srt.layers.quantization.mxfp4_marlin_moe", reason="this release has no DeepSeek-V4 on Marlin"
    )
    if hasattr(module, "build_marlin_moe_quant_info"):
        pytest.skip("this release deletes these scales itself")
    from sglang.srt.layers.quantization import marlin_utils, marlin_utils_fp4

    def repack(b_q_weight, perm, size_k, size_n, num_bits, **kwargs):
        return b_q_weight.reshape(size_k // 16, size_n * 2).clone()

    monkeypatch.setattr(marlin_utils_fp4, "gptq_marlin_repack", repack, raising=False)
    monkeypatch.setattr(marlin_utils_fp4, "marlin_make_workspace", lambda *args: torch.zeros(1, dtype=torch.int))
    monkeypatch.setattr(marlin_utils, "check_moe_marlin_supports_layer", lambda *args: True)
    monkeypatch.setattr(module, "is_sm90_supported", lambda: True)

    def make_on_marlin():
        method = module.Mxfp4MarlinMoEMethod(
            SimpleNamespace(process_weights_after_loading=lambda layer: None), "experts"
        )
        method.runner = SimpleNamespace(runner_backend=MoeRunnerBackend.MARLIN, run=run)
        return method

    return SimpleNamespace(make=make_on_marlin, names=("w13_weight_scale_inv", "w2_weight_scale_inv"))


def processed(kind):
    layer = Layer(kind.make())
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def tensors_read(layer):
    """The tensors that a kernel is given."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    top_k = StandardTopKOutput(torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, EXPERTS))
    dispatched = SimpleNamespace(hidden_states=torch.zeros(2, HIDDEN), topk_output=top_k)
    result = layer.quant_method.apply(layer, dispatched)
    info = vars(getattr(result, "hidden_states", result))
    for name in ("w13_precision_config", "w2_precision_config"):
        if name in info:
            info[name] = info[name].weight_scale
    return {name: value.clone() for name, value in info.items() if isinstance(value, torch.Tensor)}


def test_what_the_kernel_gets_is_the_same_and_the_rest_takes_no_memory(kind):
    stock = processed(kind)
    expected = tensors_read(stock)
    with installed(fp4_weights.CHANGE):
        ours = processed(kind)
    given = tensors_read(ours)
    assert len(expected) >= 4
    assert given.keys() == expected.keys()
    assert all(torch.equal(given[name], expected[name]) for name in expected)
    assert {name for name in kind.names if getattr(stock, name).nbytes > EXPERTS * 4} == set(kind.names)
    assert [getattr(ours, name).shape for name in kind.names] == [(EXPERTS, 1, 1)] * 2
    for name in kind.names:  # poisoned, they change nothing in stock either
        getattr(stock, name).data.fill_(99)
    poisoned = tensors_read(stock)
    assert all(torch.equal(poisoned[name], expected[name]) for name in expected)


def test_it_says_of_a_built_layer_what_it_will_give_up(kind):
    layer = Layer(kind.make())
    sizes = {name: getattr(layer, name).nbytes for name in kind.names}
    assert unread_scales(layer) == (sizes, "")
    layer._mega_moe_weights_built = True
    assert unread_scales(layer) == ({}, "DeepGEMM's mega kernel runs its experts")


def test_an_apply_that_reads_a_scale_again_or_hands_its_layer_on_keeps_it(kind, monkeypatch, tmp_path):
    """As a newer release may."""
    layer = Layer(kind.make())
    source = "def apply(self, layer, dispatch_output):\n    {}\n    return self.runner.run(dispatch_output, None)\n"
    for statement, reason in (
        (f"use(layer.{kind.names[0]}, layer.{kind.names[1]})", "reads all of its scales"),
        ("self.kept = layer", "apply may keep its layer"),
        ("[f(layer) for f in self.hooks]", "gives its layer to f"),
    ):
        path = tmp_path / f"newer_{abs(hash(statement))}.py"
        path.write_text(source.format(statement))
        namespace = {"__name__": "sglang.newer"}
        exec(compile(path.read_text(), str(path), "exec"), namespace)
        monkeypatch.setattr(type(layer.quant_method), "apply", namespace["apply"])
        found = unread_scales(layer)
        assert found.bytes_of == {}
        assert reason in found.reason


def test_a_scale_whose_memory_is_read_is_not_counted(kind):
    layer = processed(kind)
    alias = getattr(layer, kind.names[0]).data
    other = getattr(layer, kind.names[1]).nbytes
    assert fp4_weights.give_up_unread_scales(layer) == other
    assert alias.abs().sum() > 0


def test_an_update_ends_as_on_the_stock_server(kind):
    def update(layer):
        outcomes = []
        for name in ("w13_weight", "w2_weight", *kind.names):
            for shape in ((EXPERTS, 2 * INTERMEDIATE, HIDDEN // 32), (EXPERTS, HIDDEN, INTERMEDIATE // 32), (5, 5)):
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
        return outcomes

    stock = update(processed(kind))
    with installed(fp4_weights.CHANGE):
        ours = update(processed(kind))
    assert "loaded" in stock
    assert stock == ours
