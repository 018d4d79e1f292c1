"""Tests of the dead input on the engine's own models, for all families but DeepSeek's.

A layer's input is dead when no code reads it any more. The layer then offers it as a buffer for the experts' output.
The tests check that answers stay unchanged, and that a layer writes its output over its input. They also check that
the guards are needed: without the guard ``may_offer``, answers change.
"""

from __future__ import annotations

import functools
import math
import sys
from importlib.util import spec_from_loader

import pytest
import torch
from common.triton_on_cpu import triton_runner
from conftest import DEFAULT_ENGINE_ONLY, installed, without_buffer
from harness import Pool, TensorRecorder, make_norms_out_of_place, same_answers, watch_forwards
from sglang_moe_patches.changes import cutedsl_sizing, deferred_shared_experts, moe_workspace, output_buffer
from sglang_moe_patches.changes.moe_workspace import column_slices
from sglang_moe_patches.core import engine as engine_code
from sglang_moe_patches.core import fused_moe_call
from sglang_moe_patches.core.dead_input import channel, offer, proofs
from sglang_moe_patches.core.patch import Plan, Status, probe
from sglang_moe_patches.lab.observers import counting
from sglang_moe_patches.lab.observers.events import ChangeStatus
from sglang_moe_reference import families as tiny
from sglang_moe_reference.model import ModelSpec, make_model

pytestmark = pytest.mark.every_release

PROMPTS = [[11, 7, 300, 42] * 9, [5], list(range(40, 140))]
STEPS = 4
FAMILIES = [name for name in tiny.FAMILIES if name != "deepseek-v3"]  # test_output_buffer.py tests DeepSeek's family


def product_only(*case):
    """Return a parametrized case that only `make test-all` runs, because CI already runs a similar case."""
    return pytest.param(*case, marks=pytest.mark.product)


FAMILIES_ONE_IN_CI = ["qwen3-moe", *(product_only(family) for family in FAMILIES if family != "qwen3-moe")]


def without_dense_layers(family):
    """Return the options that make all layers of a family's tiny model MoE layers."""
    return {} if tiny.FAMILIES[family].dense_layers is None else {"dense_layers": 0}


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def path(family, checkpoint):
    """Path of a tiny checkpoint of a model family. All layers of the model are MoE layers."""
    return checkpoint(family=family, **without_dense_layers(family))


@pytest.fixture(scope="session")
def write_bf16(tmp_path_factory):
    """Function that writes an unquantized checkpoint of a family, with MoE layers only, and returns its folder."""
    made = {}

    def make(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp("bf16") / "tiny"
            make_model(
                made[family],
                ModelSpec(family=family, top_k=3, hidden=512, **without_dense_layers(family)),
                quantized=False,
            )
        return made[family]

    return make


@pytest.fixture
def run(engine):
    """Function that builds a model with the given changes, and returns its greedy tokens and logits. Without changes,
    the model is stock."""

    def run(path, *changes):
        with installed(*changes) if changes else without_buffer():
            return engine.generate(engine.load(path), PROMPTS, STEPS)

    return run


@pytest.fixture(scope="module")
def stock_qwen3(engine, checkpoint):
    """Greedy tokens and logits of the stock engine with the tiny Qwen3 model."""
    with without_buffer():
        return engine.generate(engine.load(checkpoint(family="qwen3-moe")), PROMPTS, STEPS)


def raise_os_error():
    raise OSError("source code not available")


@pytest.mark.parametrize(
    ("proof", "refuse", "reason"),
    [
        ("input_dies", bool, "Qwen3MoeDecoderLayer may read its input after the first norm"),
        ("attention_input_dies", bool, "Qwen3MoeDecoderLayer may read attention's input after attention"),
        ("captures_only_sums", bool, "Qwen3MoeDecoderLayer may keep captured hidden states"),
        ("input_dies", raise_os_error, "OSError: source code not available"),
    ],
)
@pytest.mark.parametrize("family", ["qwen3-moe"])
def test_a_family_whose_proof_fails_is_unpatched_and_the_reason_is_logged(
    proof, refuse, reason, path, run, stock_qwen3, monkeypatch, caplog
):
    original = getattr(proofs, proof)
    monkeypatch.setattr(
        proofs, proof, lambda code, *more: refuse() if "Qwen3" in code.__qualname__ else original(code, *more)
    )
    with caplog.at_level("INFO"):
        assert same_answers(run(path, output_buffer.CHANGE), stock_qwen3)
    assert caplog.text.count(f"layers of Qwen3MoeModel do not offer their dead input: {reason}") == 1


class CannotBeImported:
    """Import finder for one module whose import raises an exception."""

    def __init__(self, name):
        self.name = name

    def find_spec(self, name, path=None, target=None):
        return spec_from_loader(name, self) if name == self.name else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        raise RuntimeError("no such operator")


@pytest.mark.parametrize("family", ["qwen3-moe"])
def test_other_families_still_offer_if_deepseeks_module_cannot_be_imported(
    engine, path, stock_qwen3, kernels, monkeypatch
):
    """If DeepSeek's module cannot be imported, the layers of other families still offer their input. The engine, too,
    ignores a module that it cannot import, and serves other models.
    """
    name = "sglang.srt.models.deepseek_v2"
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [CannotBeImported(name), *sys.meta_path])
    reason = f"cannot import {name}: RuntimeError: no such operator"
    assert probe(deferred_shared_experts.CHANGE) == Plan.unsupported(reason)
    for change in (output_buffer.CHANGE, moe_workspace.CHANGE):
        assert probe(change).reason.startswith(f"layers of DeepSeek models do not offer their dead input: {reason}")
    with installed(output_buffer.CHANGE, moe_workspace.CHANGE):
        model = engine.load(path)
        assert same_answers(engine.generate(model, PROMPTS, STEPS), stock_qwen3)
        assert find_overwritten_inputs(engine, model, kernels) == [False, True, True, True]


def find_overwritten_inputs(engine, model, kernels):
    """Run one forward pass. Return one boolean for each layer: whether the MoE kernel wrote its output over the layer's
    input.
    """
    inputs = []
    for layer in model.model.layers:
        watch_forwards(layer, lambda given, result: inputs.append(given["hidden_states"]))
    kernels.calls.clear()
    engine.generate(model, PROMPTS[:1], 0)
    for layer in model.model.layers:
        del layer.forward
    return [one.untyped_storage().data_ptr() == output for one, output in zip(inputs, kernels.calls, strict=True)]


@pytest.mark.parametrize("family", ["qwen3-moe"])
def test_a_patched_deepseek_layer_offers_nothing_and_other_families_do(
    engine, path, checkpoint, kernels, run, monkeypatch
):
    """If another plugin has wrapped the ``forward`` of DeepSeek's decoder layer, DeepSeek's layers offer nothing: this
    package makes no offer, and it disables the engine's own offer. Layers of other families offer their input.
    """
    layer = layer_class("deepseek-v3")
    paths = (path, checkpoint(dense_layers=0))
    original, expected = layer.forward, [run(each) for each in paths]
    monkeypatch.setattr(layer, "forward", functools.wraps(original)(lambda *args, **kwargs: original(*args, **kwargs)))
    plan = probe(output_buffer.CHANGE)
    assert plan.reason.startswith(
        "layers of DeepSeek models do not offer their dead input: DeepseekV2DecoderLayer.forward is wrapped or replaced"
    )
    assert probe(deferred_shared_experts.CHANGE).status is Status.UNSUPPORTED
    with installed(output_buffer.CHANGE):
        for each, stock, over in zip(paths, expected, ([False, True, True, True], [False] * 4), strict=True):
            model = engine.load(each)
            assert same_answers(engine.generate(model, PROMPTS, STEPS), stock)
            assert find_overwritten_inputs(engine, model, kernels) == over


@pytest.mark.parametrize("family", ["qwen3-moe"])
def test_a_layer_with_a_forward_hook_offers_nothing(engine, path, kernels):
    """A layer with a forward hook offers nothing, and neither does the layer after it, because the hook may keep
    tensors. The engine registers the hooks of ``--forward-hooks`` after it has built a model, so a layer must look for
    hooks when it runs.
    """
    with installed(output_buffer.CHANGE):
        model = engine.load(path)
        model.model.layers[1].self_attn.qkv_proj.register_forward_hook(lambda module, given, result: None)
        assert find_overwritten_inputs(engine, model, kernels) == [False, False, False, True]


def keep_layers_results(model, keeper):
    """Register hooks that keep a reference to each layer's result.

    The test needs norms that do not work in place (``--enable-deterministic-inference``). Otherwise the next layer's
    norm would overwrite the result.
    """
    for layer in model.model.layers[:-1]:
        layer.register_forward_hook(lambda module, given, result: keeper(result))


def keep_experts_results(model, keeper):
    for layer in model.model.layers[:-1]:
        layer.mlp.register_forward_hook(lambda module, given, result: keeper(result))


def keep_norms_results(model, keeper):
    norms = {layer.input_layernorm for layer in model.model.layers}
    return torch.nn.modules.module.register_module_forward_hook(
        lambda module, given, result: keeper(result) if module in norms else None
    )


def keep_norms_inputs(model, keeper):
    norms = {layer.input_layernorm for layer in model.model.layers[1:]}
    return torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, given: keeper(given) if module in norms else None
    )


@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])
@pytest.mark.parametrize(
    ("keep", "in_place"),
    [
        (keep_layers_results, False),
        (keep_experts_results, False),
        (keep_norms_results, True),
        (keep_norms_inputs, False),
    ],
)
def test_a_tensor_that_a_forward_hook_keeps_is_not_overwritten(keep, in_place, engine, path, monkeypatch):
    if not in_place:
        make_norms_out_of_place(monkeypatch)

    def check_kept_tensors(*changes):
        keeper = TensorRecorder()
        with installed(*changes) if changes else without_buffer():
            model = engine.load(path)
            hook = keep(model, keeper)
            engine.generate(model, PROMPTS[:1], 0)
        if hook is not None:
            hook.remove()
        return keeper.list_intact()

    stock = check_kept_tensors()
    assert len(stock) in (3, 4)
    assert all(stock)
    assert check_kept_tensors(output_buffer.CHANGE) == stock


@pytest.mark.parametrize(
    ("backend", "family"),
    [
        *(("flashinfer_trtllm_routed", family) for family in FAMILIES),
        ("flashinfer_trtllm", "qwen3-moe"),
        # The reference kernel does not route as MiniMax-M2 does.
        *(
            product_only("flashinfer_trtllm", family)
            for family in FAMILIES
            if family not in ("qwen3-moe", "minimax-m2")
        ),
    ],
)
def test_a_familys_answers_have_the_stock_bits_and_each_layer_writes_over_its_input(backend, engine, path, kernels):
    """The patched model's answers equal the stock model's bit for bit, and each layer writes its output over its input.
    The kernel first fills its output with NaN, so code that still reads the dead input would answer NaN.
    """

    def answers():
        model = engine.load(path)
        return engine.generate(model, PROMPTS, STEPS), find_overwritten_inputs(engine, model, kernels)

    with engine.override_arguments(moe_runner_backend=backend):
        with without_buffer():
            stock, stock_over = answers()
        with installed(output_buffer.CHANGE):
            patched, patched_over = answers()
    assert stock[1].isfinite().all()
    assert same_answers(patched, stock)
    assert stock_over == [False] * 4
    assert patched_over == [False, True, True, True]  # the first layer's input becomes the residual


def layer_class(family):
    module = engine_code.import_module(f"sglang.srt.models.{tiny.FAMILIES[family].layers}")
    (layer,) = (kind for name, kind in vars(module).items() if name.endswith("DecoderLayer"))
    return layer


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", ["deepseek-v3", *FAMILIES_ONE_IN_CI])
def test_offering_the_residual_changes_a_familys_answers(family, path, run, monkeypatch):
    """If the first layer offered its input, which becomes the residual, the answers would change. ``may_offer``
    prevents this offer. The test replaces ``may_offer`` and finds other answers.
    """
    stock = run(path)
    monkeypatch.setattr(layer_class(family), offer._MIN_OFFER_BYTES_ATTRIBUTE, 0, raising=False)
    assert same_answers(run(path, output_buffer.CHANGE), stock)  # the residual is checked in every forward pass
    monkeypatch.setattr(offer, "may_offer", lambda hidden_states, residual: True)
    assert not same_answers(run(path, output_buffer.CHANGE), stock)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_familys_hidden_states_captured_for_eagle3_survive_the_forward(engine, family, path, monkeypatch):
    def captured():
        model = engine.load(path)
        model.set_eagle3_layers_to_capture([1, 2])
        stack = type(model.model)
        original, found = stack.forward, []

        def capturing(self, *args, **kwargs):
            hidden, aux = original(self, *args, **kwargs)
            found.append((hidden.clone(), torch.cat(list(aux), dim=-1) if isinstance(aux, list | tuple) else aux))
            return hidden, aux

        with monkeypatch.context() as patch:
            patch.setattr(stack, "forward", capturing)
            engine.generate(model, PROMPTS[:1], 0)
        return found[0]

    with without_buffer():
        stock = captured()
    with installed(output_buffer.CHANGE):
        patched = captured()
    assert stock[1].shape[-1] == 2 * stock[0].shape[-1]
    assert all(torch.equal(a, b) for a, b in zip(stock, patched, strict=True))


@pytest.mark.parametrize("family", FAMILIES_ONE_IN_CI)
def test_cutedsl_takes_the_dead_input_and_answers_with_the_stock_bits(engine, path, run, monkeypatch):
    if probe(cutedsl_sizing.CHANGE).install is None:
        pytest.skip("the engine's CuteDSL wrapper allocates its own output")
    taken_buffers, take = [], channel.take_output
    monkeypatch.setattr(
        channel, "take_output", lambda *a, **k: taken_buffers.append(take(*a, **k)) or taken_buffers[-1]
    )
    with engine.override_arguments(moe_runner_backend="flashinfer_cutedsl"):
        stock = run(path)
        assert taken_buffers == []
        assert same_answers(run(path, output_buffer.CHANGE, cutedsl_sizing.CHANGE), stock)
    forwards = len(taken_buffers) // 4
    assert forwards == STEPS + 1
    assert [buffer is None for buffer in taken_buffers] == [True, False, False, False] * forwards


@pytest.mark.parametrize("family", ["qwen3-moe"])
def test_a_layer_in_an_unproved_loop_offers_nothing(engine, path, kernels, monkeypatch):
    """A layer offers nothing if code without a proof runs the loop over the layers. Such code may keep a layer's
    input.
    """
    with installed(output_buffer.CHANGE):
        stack = engine_code.import_module("sglang.srt.models.qwen3_moe").Qwen3MoeModel
        loop = stack.forward
        monkeypatch.setattr(stack, "forward", lambda self, *args, **kwargs: loop(self, *args, **kwargs))
        assert find_overwritten_inputs(engine, engine.load(path), kernels) == [False] * 4


@pytest.mark.parametrize("family", ["qwen3-moe"])
def test_with_symmetric_memory_the_pool_is_not_searched_in_every_layer(engine, path, kernels, monkeypatch):
    """The engine's runner searches the pool of symmetric memory for an offered buffer's address only once, because the
    change caches the addresses.
    """
    pool = Pool(monkeypatch)

    def count_pool_walks(*changes):
        with installed(*changes):
            model = engine.load(path)
            engine.generate(model, PROMPTS, STEPS)
            assert find_overwritten_inputs(engine, model, kernels) == [False, *[bool(changes)] * 3]
            pool.walks = 0
            find_overwritten_inputs(engine, model, kernels)
            return pool.walks

    assert count_pool_walks() == 0
    assert count_pool_walks(output_buffer.CHANGE) == 0


# --- The Triton runner -----------------------------------------------------------------------------------------------


@pytest.fixture
def use_triton(engine, monkeypatch):
    """Make BF16 models run the engine's Triton kernels. Even small outputs are computed in column slices."""
    triton_runner(monkeypatch)
    for name, value in (("MIN_TENSOR_BYTES", 1), ("MIN_BYTES_SAVED_PER_SLICE", 1), ("MAX_SLOWDOWN_FRACTION", math.inf)):
        monkeypatch.setattr(column_slices, name, value)
    monkeypatch.setattr(column_slices, "SLICE_ALIGNMENT_COLUMNS", 64)
    monkeypatch.setattr(offer, "MIN_SLICED_OFFER_BYTES", 1)
    with engine.override_arguments(quantization=None, moe_runner_backend="triton"):
        yield


@pytest.fixture
def taken_buffers(monkeypatch):
    """List with one entry for each buffer that a runner took: "output" or "scratch". The fixture fills each such buffer
    with NaN.
    """
    buffers = []

    def record(name, label):
        original = getattr(channel, name)

        def poisoned(*args, **kwargs):
            memory = original(*args, **kwargs)
            if memory is not None:
                buffers.append(label)
                memory.fill_(float("nan"))
            return memory

        monkeypatch.setattr(channel, name, poisoned)

    record("take_output", "output")
    record("take_scratch", "scratch")
    return buffers


TRITON_CHANGES = {
    "all": (output_buffer.CHANGE, deferred_shared_experts.CHANGE, moe_workspace.CHANGE),
    "output-buffer": (output_buffer.CHANGE,),
    "deferred-shared-experts": (deferred_shared_experts.CHANGE,),
    "moe-workspace": (moe_workspace.CHANGE,),
}
#: Expected values of ``taken_buffers``. The last three of four layers take an output buffer in each forward pass, or
#: scratch memory in the prefill only.
OUTPUT, SCRATCH = ["output"] * 3 * (STEPS + 1), ["scratch"] * 3


@DEFAULT_ENGINE_ONLY
@pytest.mark.usefixtures("use_triton")
@pytest.mark.parametrize(
    ("family", "selected", "expected"),
    [
        ("deepseek-v3", "all", OUTPUT),
        ("deepseek-v3", "output-buffer", []),
        ("deepseek-v3", "deferred-shared-experts", OUTPUT),
        ("deepseek-v3", "moe-workspace", SCRATCH),
        ("qwen3-moe", "deferred-shared-experts", []),
        ("qwen3-moe", "all", SCRATCH),
        *(product_only(family, "all", SCRATCH) for family in FAMILIES if family != "qwen3-moe"),
    ],
)
def test_the_triton_runner_takes_the_dead_input_and_answers_with_the_stock_bits(
    family, selected, expected, write_bf16, run, taken_buffers
):
    path = write_bf16(family)
    stock = run(path)
    assert stock[1].isfinite().all()
    assert taken_buffers == []
    assert same_answers(run(path, *TRITON_CHANGES[selected]), stock)
    assert taken_buffers == expected


@DEFAULT_ENGINE_ONLY
@pytest.mark.usefixtures("use_triton")
def test_actions_of_the_changes_in_triton_layers_are_counted(write_bf16, run, patcher):
    """``counting.describe_actions`` says in how many layers each change acted. The model has four layers. The input of
    the first layer is never dead, so three layers offer their input."""
    applied = [ChangeStatus(change.name, Status.APPLIED, "") for change in TRITON_CHANGES["all"]]
    tally = counting.Tally([count for counts in counting.active_counts(applied).values() for count in counts])
    tally.install(patcher)
    run(write_bf16("qwen3-moe"), *TRITON_CHANGES["all"])
    assert counting.describe_actions(applied, tally.acted) == [
        "output-buffer: offered the dead input in 3 of 4 MoE layers",
        "deferred-shared-experts: did nothing",
        "moe-workspace: ran in columns in 4 of 4 MoE layers, up to 2 slices; "
        "took the dead input as scratch memory in 3 of 4 MoE layers",
    ]


@DEFAULT_ENGINE_ONLY
@pytest.mark.usefixtures("use_triton", "taken_buffers")
@pytest.mark.parametrize(("family", "selected"), [("deepseek-v3", "deferred-shared-experts"), ("qwen3-moe", "all")])
def test_offering_the_residual_to_triton_changes_the_answers(family, selected, write_bf16, run, monkeypatch):
    path = write_bf16(family)
    stock = run(path)
    monkeypatch.setattr(layer_class(family), offer._MIN_OFFER_BYTES_ATTRIBUTE, 0, raising=False)
    monkeypatch.setattr(offer, "may_offer", lambda hidden_states, residual: True)
    assert not same_answers(run(path, *TRITON_CHANGES[selected]), stock)


@pytest.fixture
def require_package_pool():
    """Skip the test on engine releases after 0.5.15.post1. These releases allocate Triton's output in the pool of
    symmetric memory by themselves.
    """
    if engine_code.mentions(fused_moe_call.probe()[1], "use_symmetric_memory"):
        pytest.skip("this engine release allocates Triton's output in the pool itself")


@pytest.fixture
def require_package_deferral():
    if probe(deferred_shared_experts.CHANGE).status is not Status.APPLIED:
        pytest.skip("this engine release defers the shared experts itself")


@pytest.fixture
def expert_outputs(monkeypatch):
    """List with one entry for each call of routed experts: the output, and whether the output shares memory with the
    input.
    """
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    outputs, original = [], FusedMoE.run_moe_core

    def run_moe_core(self, dispatch_output):
        given = dispatch_output.hidden_states
        combined = original(self, dispatch_output)
        outputs.append((combined.hidden_states, channel.shares_storage(combined.hidden_states, given)))
        return combined

    monkeypatch.setattr(FusedMoE, "run_moe_core", run_moe_core)
    return outputs


@pytest.mark.usefixtures("require_package_pool", "use_triton")
@pytest.mark.parametrize(
    ("selected", "cuts_columns"), [("deferred-shared-experts", True), ("all", True), ("all", False)]
)
def test_with_symmetric_memory_tritons_output_lies_in_the_pool_even_if_a_buffer_is_offered(
    selected, cuts_columns, write_bf16, engine, run, expert_outputs, monkeypatch
):
    """The experts' output lies in the pool of NCCL symmetric memory, even if a buffer outside the pool is offered. The
    stock Triton runner writes the output over its input, which lies in the pool. The patched runner must allocate its
    output in the pool, and must not use the offered buffer.

    :param cuts_columns: whether the outputs are computed in column slices.
    """
    if not cuts_columns:
        monkeypatch.setattr(column_slices, "MAX_SLOWDOWN_FRACTION", 0)
    path = write_bf16("deepseek-v3")
    stock = run(path)
    assert [in_place for _, in_place in expert_outputs] == [True] * 4 * (STEPS + 1)
    expert_outputs.clear()
    pool = Pool(monkeypatch)
    assert same_answers(run(path, *TRITON_CHANGES[selected]), stock)
    assert [(pool.holds(made), in_place) for made, in_place in expert_outputs] == [(True, False)] * 4 * (STEPS + 1)


@pytest.mark.usefixtures("require_package_deferral", "use_triton")
def test_without_deferred_shared_experts_tritons_output_needs_no_more_memory_than_stock(
    write_bf16, engine, expert_outputs
):
    """If the shared experts run before the routed experts, the Triton runner writes the routed experts' output over
    their input, as in the stock server. The output then needs no new memory.

    The test first runs a whole MoE block, which defers its shared experts: the routed experts' output is a new tensor.
    The test then calls the shared experts and after them the routed experts, as traced prefill graphs do. Now no shared
    experts are deferred, and the output lies in the input's memory.
    """
    with installed(deferred_shared_experts.CHANGE):
        block = engine.load(write_bf16("deepseek-v3")).model.layers[1].mlp
        hidden = torch.randn(5, 512).bfloat16()
        with torch.no_grad():
            waited = block.forward_normal(hidden.clone())
            expected = block.shared_experts(hidden)
            routed = block.experts(given := hidden.clone(), block.topk(hidden, block.gate(hidden)))
    assert [in_place for _, in_place in expert_outputs] == [False, True]
    assert channel.shares_storage(routed, given)
    assert torch.equal(routed.mul_(block.routed_scaling_factor).add_(expected), waited)


@DEFAULT_ENGINE_ONLY
@pytest.mark.usefixtures("use_triton")
def test_in_a_server_with_lora_triton_stays_in_place(write_bf16, run, taken_buffers, monkeypatch):
    path = write_bf16("deepseek-v3")
    stock = run(path)
    monkeypatch.setattr(deferred_shared_experts.runners, "serves_lora", lambda: True)
    assert same_answers(run(path, *TRITON_CHANGES["all"]), stock)
    assert taken_buffers == SCRATCH
