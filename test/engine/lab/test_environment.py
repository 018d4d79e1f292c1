"""Check the properties of the reference kernels' environment that make comparisons of answers meaningful."""

from __future__ import annotations

import random

import pytest
import torch
from conftest import DEFAULT_ENGINE_ONLY
from sglang_moe_patches.core.patch import Change, Skip, apply


# On 0.5.23 (PyTorch 2.14), an answer depends on the batch on some machines, for an unknown reason. This package is not
# the cause. Comparisons on 0.5.23 therefore use the same batches.
@DEFAULT_ENGINE_ONLY
def test_an_answer_does_not_depend_on_the_other_requests_of_its_batch(engine, checkpoint):
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 700) for _ in range(rng.choice([1, 2, 7, 40, 130, 300]))] for _ in range(24)]
    model = engine.load(checkpoint(dense_layers=0))
    tokens, logits = engine.generate(model, prompts, 4)
    for index, prompt in enumerate(prompts):
        alone_tokens, alone_logits = engine.generate(model, [prompt], 4)
        assert alone_tokens == [tokens[index]]
        assert torch.equal(alone_logits[:, 0], logits[:, index])


@pytest.mark.compatibility
@pytest.mark.every_release
def test_the_add_norm_writes_in_place_as_on_a_gpu(engine):
    from sglang.srt.layers.layernorm import RMSNorm

    norm = RMSNorm(64)
    hidden, residual = torch.randn(3, 64), torch.randn(3, 64)
    total = hidden + residual
    normed, summed = norm(hidden, residual)
    assert normed is hidden
    assert summed is residual
    assert torch.equal(residual, total)
    torch.testing.assert_close(hidden, total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6))


@pytest.mark.product
@DEFAULT_ENGINE_ONLY
def test_an_answer_does_not_depend_on_the_chunks_of_its_prefill(engine, checkpoint):
    """A prompt's logits are the same, whether its prefill has one chunk or two. In a server, the other requests of a
    batch decide where a prompt is divided into chunks. Without sums in float64, the prompt of 40 tokens, divided after
    7 tokens, would get other logits."""
    rng = random.Random(1)
    model = engine.load(checkpoint(dense_layers=0))
    for length, cut in ((300, 100), (600, 512), (700, 33), (900, 640), (40, 7)):
        prompt = [rng.randrange(3, 700) for _ in range(length)]
        _, whole = engine.generate(model, [prompt], 0)
        assert torch.equal(engine.prefill_in_two(model, prompt, cut), whole[0]), (length, cut)


@pytest.mark.every_release
@pytest.mark.usefixtures("engine")
def test_a_changes_skip_function_receives_resolved_arguments(checkpoint):
    """A change's skip function must receive resolved server arguments. The function decides whether a server runs
    without the change.

    To resolve arguments, the engine computes those that the user did not give, such as the device. From 0.5.20 on, a
    new ``ServerArgs`` is not resolved: its device is not set unless ``--device`` is given.
    """
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path=str(checkpoint()), quantization="modelopt_fp4")
    if hasattr(arguments, "resolve_once"):
        arguments.resolve_once()
    change = Change("a", "", pytest.fail, skip=lambda server_args: Skip(f"it is on a {server_args.device}"))
    assert apply([change], {"a"}, arguments)["a"].reason == "it is on a cpu"
