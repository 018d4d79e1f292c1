"""GPU tests of cutedsl-sizing with CUDA graphs: all layers share one CuteDSL wrapper.

FlashInfer's CuteDSL kernels need a Blackwell GPU. A stand-in for FlashInfer's wrapper has the same buffers, and raises
the same error for too many tokens. It computes two matrix products instead of the kernels.
"""

from __future__ import annotations

import pytest
import torch
from sglang_moe_patches.changes.cutedsl_sizing.wrapper import SharedMoE
from sglang_moe_patches.core.dead_input.channel import moe_output_buffer_ctx

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

LAYERS, TOKENS, HIDDEN, INTERMEDIATE = 4, 64, 256, 512


class Wrapper:
    """Stand-in for FlashInfer's ``CuteDslMoEWrapper``: it has buffers for ``max_num_tokens`` tokens."""

    def __init__(self) -> None:
        self.max_num_tokens, self.hidden_size, self.output_dtype = TOKENS, HIDDEN, torch.bfloat16
        self._gemm1_output = torch.empty(TOKENS, INTERMEDIATE, dtype=torch.bfloat16, device="cuda")
        self._moe_output = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")

    def run(self, *, x, token_selected_experts, w1_weight, w2_weight):
        tokens = token_selected_experts.shape[0]
        if tokens > self.max_num_tokens:
            raise ValueError(f"num_tokens ({tokens}) exceeds max_num_tokens ({self.max_num_tokens})")
        torch.mm(x, w1_weight, out=self._gemm1_output[:tokens])
        return torch.mm(self._gemm1_output[:tokens].relu_(), w2_weight, out=self._moe_output[:tokens])


@pytest.fixture
def weights():
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape):
        return (torch.randn(shape, generator=generator, device="cuda") / shape[0] ** 0.5).bfloat16()

    return [(random(HIDDEN, INTERMEDIATE), random(INTERMEDIATE, HIDDEN)) for _ in range(LAYERS)]


def inputs(tokens, seed):
    return torch.randn(tokens, HIDDEN, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").bfloat16()


def model(wrappers, weights, hidden):
    """Return the output of a small model. Each layer offers its input as a buffer for the experts' output, as decoder
    layers do.

    No code reads the input any more when the layer's experts write their output.
    """
    residual = torch.zeros_like(hidden)
    hidden = hidden.clone()
    ids = torch.zeros(hidden.shape[0], 1, dtype=torch.int32, device="cuda")
    for wrapper, (w1, w2) in zip(wrappers, weights, strict=True):
        residual += hidden
        normed = torch.nn.functional.layer_norm(residual, (HIDDEN,))
        with moe_output_buffer_ctx(hidden):
            hidden = wrapper.run(x=normed, token_selected_experts=ids, w1_weight=w1, w2_weight=w2)
    return residual + hidden


def test_a_captured_graph_answers_as_with_one_wrapper_per_layer(weights):
    wrappers = [SharedMoE(Wrapper(), 1, torch.cuda.is_current_stream_capturing)] * LAYERS
    scratch = wrappers[0]._gemm1_output
    graphs = {}
    for tokens in (TOKENS, 8, 1):
        given = inputs(tokens, 0)
        model(wrappers, weights, given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = model(wrappers, weights, given)
        graphs[tokens] = graph, given, output
    for seed in range(1, 4):
        for tokens, (graph, given, output) in graphs.items():
            given.copy_(inputs(tokens, seed))
            scratch.fill_(float("nan"))
            output.fill_(float("nan"))
            graph.replay()
            own = [Wrapper() for _ in range(LAYERS)]
            assert torch.equal(output, model(own, weights, inputs(tokens, seed)))
            # An eager forward pass must not change the next replay.
            assert torch.equal(output, model(wrappers, weights, inputs(tokens, seed)))
