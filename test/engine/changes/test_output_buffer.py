"""Tests of output-buffer on the engine's own model: answers are equal to stock's, and all layers share one buffer. Some
tests remove a check of the change, and find wrong answers without it.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from conftest import installed, without_buffer
from harness import Pool, same_answers, watch_forwards
from sglang_moe_patches.changes import deferred_shared_experts, output_buffer
from sglang_moe_patches.core import runners
from sglang_moe_patches.core.dead_input import channel, offer, takers
from sglang_moe_patches.core.patch import Patcher, Status, probe
from sglang_moe_patches.lab.observers import forwards

pytestmark = pytest.mark.every_release

PROMPTS = [[11, 7, 300, 42] * 9, [5], list(range(40, 140))]
STEPS = 4
BACKENDS = ["flashinfer_trtllm_routed", "flashinfer_trtllm"]
CHANGES = (output_buffer.CHANGE, deferred_shared_experts.CHANGE)


@pytest.fixture(params=BACKENDS)
def backend(request, engine):
    with engine.override_arguments(moe_runner_backend=request.param):
        yield request.param


@pytest.fixture
def require_package_buffer():
    if probe(output_buffer.CHANGE).status is not Status.APPLIED:
        pytest.skip("this engine release has an output buffer of its own")


@pytest.fixture
def require_engine_buffer():
    if probe(output_buffer.CHANGE).status is not Status.HARDENED:
        pytest.skip("this engine release has no output buffer of its own")


@pytest.fixture
def stock(engine):
    """Function that returns a model's greedy tokens and logits from the stock engine, without any shared buffer. It
    caches the results of each model.
    """

    @functools.cache
    def stock(path):
        with without_buffer():
            return engine.generate(engine.load(path), PROMPTS, STEPS)

    return stock


def generate_patched(engine, path):
    with installed(*CHANGES):
        return engine.generate(engine.load(path), PROMPTS, STEPS)


@pytest.mark.compatibility
@pytest.mark.parametrize("dense_layers", [1, 0])
def test_answers_are_bit_identical_with_one_buffer_for_all_layers(
    backend, dense_layers, engine, checkpoint, kernels, stock
):
    path = checkpoint(dense_layers=dense_layers)
    assert stock(path)[1].isfinite().all()
    moe_layers = 4 - dense_layers
    with without_buffer():
        model = engine.load(path)
        assert kernels.buffers_of(lambda: engine.generate(model, PROMPTS[:1], 0)) == (moe_layers, moe_layers)
    with installed(*CHANGES):
        model = engine.load(path)
        assert kernels.buffers_of(lambda: engine.generate(model, PROMPTS[:1], 0)) == (moe_layers, 1)
        assert same_answers(engine.generate(model, PROMPTS, STEPS), stock(path))


@pytest.mark.compatibility
@pytest.mark.usefixtures("require_engine_buffer")
def test_the_engines_own_offer_overwrites_a_residual_and_ours_does_not(backend, engine, checkpoint, stock, monkeypatch):
    """If the first layer has experts (``first_k_dense_replace: 0``), the engine's own output buffer overwrites the
    residual, because this layer has no separate residual. The buffer that this package offers does not overwrite the
    residual.
    """
    first_is_dense, first_is_moe = checkpoint(), checkpoint(dense_layers=0)
    engines = {path: engine.generate(engine.load(path), PROMPTS, STEPS) for path in (first_is_dense, first_is_moe)}
    assert same_answers(engines[first_is_dense], stock(first_is_dense))
    assert engines[first_is_moe][0] != stock(first_is_moe)[0]
    for path in (first_is_dense, first_is_moe):
        assert same_answers(generate_patched(engine, path), stock(path))
    # Without the guard, the engine's own offer stays active in addition to this package's.
    monkeypatch.setattr(offer, "make_empty_offer", lambda original: original)
    assert generate_patched(engine, first_is_moe)[0] != stock(first_is_moe)[0]


@pytest.mark.compatibility
@pytest.mark.usefixtures("require_engine_buffer")
def test_only_our_offer_remains(engine, checkpoint, kernels, monkeypatch):
    """The engine's own offer is disabled in every layer. The experts of every layer with a residual take the buffer
    that this package offers.
    """
    meanwhile, make = [], offer.make_empty_offer
    monkeypatch.setattr(
        offer,
        "make_empty_offer",
        lambda engines: lambda buf: meanwhile.append(channel.get_offered_buffer()) or make(engines)(buf),
    )
    with installed(*CHANGES):
        model = engine.load(checkpoint(dense_layers=0))
        kernels.calls.clear()
        engine.generate(model, PROMPTS[:1], 0)
    assert meanwhile[0] is None
    assert [buffer.untyped_storage().data_ptr() for buffer in meanwhile[1:]] == kernels.calls[1:]


def test_a_layer_without_residual_offers_nothing(engine, checkpoint, kernels):
    """A layer offers nothing if its input becomes the residual. A NextN layer is an example."""
    from sglang.srt.models.deepseek_nextn import DeepseekModelNextN

    with installed(*CHANGES):
        model = engine.load(checkpoint(dense_layers=0))
        offered = []
        kernels.at_entry = lambda: offered.append(channel.get_offered_buffer())
        for layer in model.model.layers:
            setattr(layer, offer._MIN_OFFER_BYTES_ATTRIBUTE, 0)
        engine.generate(model, PROMPTS[:1], 0)
        # After a layer has used a buffer, this package does not offer the buffer again. The first layer has offered
        # nothing.
        assert kernels.buffers_of(lambda: engine.generate(model, PROMPTS[:1], 0)) == (4, 1)
        assert offered[0] is None
        nextn = DeepseekModelNextN(model.config, None)
        assert not hasattr(nextn.decoder, offer._MIN_OFFER_BYTES_ATTRIBUTE)


@pytest.mark.parametrize("dense_layers", [1, 0])
def test_the_callers_input_embeds_are_unchanged(engine, checkpoint, monkeypatch, dense_layers):
    def answer():
        """Run a forward pass that the engine has prepared. Return the embeddings, and the result of the last layer."""
        model = engine.load(checkpoint(dense_layers=dense_layers))
        stack = type(model.model)
        original, found = stack.forward, list[torch.Tensor]()

        def forward_with_embeds(self, input_ids, positions, batch, input_embeds=None, *args, **kwargs):
            embeds = self.embed_tokens(input_ids).clone()
            found.extend((embeds, original(self, input_ids, positions, batch, embeds, *args, **kwargs)))
            return original(self, input_ids, positions, batch, input_embeds, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(stack, "forward", forward_with_embeds)
            engine.generate(model, PROMPTS[:1], 0)
        return found

    with without_buffer():
        stock = answer()
    with installed(*CHANGES):
        assert all(torch.equal(a, b) for a, b in zip(stock, answer(), strict=True))


def test_the_allreduce_fusion_mark_is_not_inherited(engine, checkpoint, kernels, monkeypatch):
    """The patched model marks the same tensors for a fused all-reduce as the stock model.

    The engine sets this mark on a layer's output tensor if the next layer fuses the output's all-reduce. The next
    layer's kernel may then write its own output into the memory of the marked tensor. This output must not inherit the
    mark.
    """

    def find_fusion_marks():
        """Return two lists of all-reduce fusion marks: those of the tensors that the layers return, and those of the
        buffers that the kernels write into.
        """
        model = engine.load(checkpoint())
        if not hasattr(model.model.layers[1], "layer_communicator"):
            pytest.skip("this engine release marks no tensors")
        returned = []
        for index, layer in enumerate(model.model.layers):
            fuse = index == 1
            layer.layer_communicator.should_fuse_mlp_allreduce_with_next_layer = lambda batch, fuse=fuse: fuse
            watch_forwards(
                layer, lambda given, result: returned.append(hasattr(result[0], "_sglang_needs_allreduce_fusion"))
            )
        kernels.marked.clear()
        engine.generate(model, PROMPTS[:1], 0)
        return returned, list(kernels.marked)

    with without_buffer():
        stock = find_fusion_marks()
    assert stock == ([False, True, False, False], [False, False, False])
    with installed(*CHANGES):
        assert find_fusion_marks() == stock
        # Without the guard, the same tensor object is offered again, and the layer after the marked layer inherits the
        # mark.
        monkeypatch.setattr(torch.Tensor, "detach", lambda tensor: tensor)
        assert find_fusion_marks()[1] == [False, True, False]


def test_attention_inputs_are_dropped_when_attention_returns(engine, checkpoint, kernels):
    try:
        from sglang.srt.layers.communicator import get_attn_tp_context

        context, name = get_attn_tp_context(), "attn_inputs_"
        getattr(context, name)
    except (ImportError, AttributeError):
        from sglang.srt.runtime_context import get_forward

        context, name = get_forward(), "attn_inputs"

    def inputs_alive():
        alive = []
        kernels.at_entry = lambda: alive.append(getattr(context, name) is not None)
        engine.generate(engine.load(checkpoint()), PROMPTS[:1], 0)
        return alive

    native = probe(output_buffer.CHANGE).status is not Status.APPLIED
    assert inputs_alive() == [not native] * 3
    with installed(*CHANGES):
        assert inputs_alive() == [False] * 3


def test_fewer_bytes_are_alive_when_the_kernel_starts(engine, checkpoint, kernels):
    prompt = [list(range(100, 400))]
    hidden_tensor = len(prompt[0]) * 256 * 2

    def measure_live_bytes():
        """Run a forward pass. Return the bytes of its tensors that exist when the kernel of the third and last MoE
        layer starts. The tensors of the model do not count."""
        model = engine.load(checkpoint())
        found = []
        before = forwards._tensor_bytes()
        kernels.calls.clear()
        kernels.at_entry = lambda: len(kernels.calls) == 3 and found.append(forwards._tensor_bytes() - before)
        engine.generate(model, prompt, 0)
        (bytes_alive,) = found
        return bytes_alive

    with without_buffer():
        stock = measure_live_bytes()
    with installed(*CHANGES):
        patched = measure_live_bytes()
    # The patched engine does not keep the previous layer's output. It also frees two tensors that some releases keep:
    # the attention input (up to 0.5.12.post1) and the shared experts' output (0.5.11).
    native = probe(output_buffer.CHANGE).status is not Status.APPLIED
    assert stock - patched >= (0.9 if native else 1.9) * hidden_tensor


def test_only_buffers_in_the_pool_are_reused_with_symmetric_memory(engine, checkpoint, kernels, stock, monkeypatch):
    right = stock(checkpoint())
    pool, outputs = Pool(monkeypatch), []
    kernels.at_entry = lambda: outputs.append(kernels.calls[-1] in pool.addresses)
    with installed(*CHANGES):
        model = engine.load(checkpoint())
        assert same_answers(engine.generate(model, PROMPTS, STEPS), right)
        # The dense layer's output is outside the pool: the first MoE layer allocates its output, and the other layers
        # reuse it.
        assert kernels.buffers_of(lambda: engine.generate(model, PROMPTS[:1], 0)) == (3, 1)
    assert outputs == [True] * 3 * (STEPS + 2)


def test_runners_that_preserve_their_input_are_marked(engine, checkpoint):
    with installed(*CHANGES):
        model = engine.load(checkpoint())
    assert [layer.mlp.experts.moe_runner_config.inplace for layer in model.model.layers[1:]] == [False] * 3

    class Experts:
        def __init__(self):
            self.use_flashinfer_trtllm_moe = False
            self.moe_runner_config = SimpleNamespace(inplace=True)

    runners.clear_inplace(Experts, Patcher())
    assert Experts().moe_runner_config.inplace


@pytest.mark.usefixtures("require_package_buffer")
def test_a_buffer_of_another_shape_is_not_used(engine, checkpoint, stock, monkeypatch):
    """The experts do not take a buffer of another shape than their output. With data-parallel attention, the layer's
    input has the tokens of one rank, and the experts compute the tokens of all ranks. The input is therefore too small
    as a buffer.
    """
    right = stock(checkpoint())

    def offer_fewer_tokens(original, **how):
        def forward(self, positions, hidden_states, forward_batch, residual, *args, **kwargs):
            with channel.moe_output_buffer_ctx(hidden_states[: len(hidden_states) // 2].clone()):
                return original(self, positions, hidden_states, forward_batch, residual, *args, **kwargs)

        return forward

    monkeypatch.setattr(offer, "make_layer_forward", offer_fewer_tokens)
    assert same_answers(generate_patched(engine, checkpoint()), right)
    monkeypatch.setattr(channel, "fits", lambda *args, **kwargs: True)
    with pytest.raises((RuntimeError, ValueError)):
        generate_patched(engine, checkpoint())


@pytest.mark.usefixtures("require_package_buffer")
def test_the_moe_input_itself_is_never_written_into(engine, checkpoint, stock, monkeypatch):
    """The routed experts never write their output into their own input. The shared experts read this input after the
    routed experts have written their output.
    """
    right = stock(checkpoint())
    monkeypatch.setattr(offer, "make_layer_forward", lambda original, **how: original)
    from sglang.srt.models.deepseek_v2 import DeepseekV2MoE

    original = DeepseekV2MoE.forward

    def offer_the_moe_input(self, hidden_states, *args, **kwargs):
        with channel.moe_output_buffer_ctx(hidden_states):
            return original(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(DeepseekV2MoE, "forward", offer_the_moe_input)
    assert same_answers(generate_patched(engine, checkpoint()), right)
    monkeypatch.setattr(takers, "shares_storage", lambda a, b: False)
    assert not same_answers(generate_patched(engine, checkpoint()), right)
