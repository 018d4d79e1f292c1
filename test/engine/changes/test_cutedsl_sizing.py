"""Tests of cutedsl-sizing on the engine's own model, in this process. FlashInfer's wrapper is real. Stand-ins replace
its kernels.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import random
import re
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from weakref import WeakValueDictionary

import pytest
import torch
from conftest import installed
from harness import graph_arguments, same_answers
from sglang_moe_patches.changes import cutedsl_sizing, output_buffer
from sglang_moe_patches.changes.cutedsl_sizing import launcher, wrapper
from sglang_moe_patches.changes.cutedsl_sizing.launcher import BUDGET, Pools, is_sized_by_engine, read_forward_limits
from sglang_moe_patches.changes.cutedsl_sizing.tokens import compute_max_forward_tokens
from sglang_moe_patches.changes.cutedsl_sizing.wrapper import SharedMoE
from sglang_moe_patches.core import engine as engine_code
from sglang_moe_patches.core.dead_input import channel
from sglang_moe_patches.core.engine import has_module
from sglang_moe_patches.core.patch import Status, probe
from sglang_moe_patches.lab.observers.forwards import workspace_bytes

pytestmark = pytest.mark.every_release

RNG = random.Random(0)
PROMPTS = [[RNG.randrange(3, 700) for _ in range(length)] for length in (5, 40, 130, 1)]
TOKENS = sum(map(len, PROMPTS))
STEPS = 4
CHANGES = (output_buffer.CHANGE, cutedsl_sizing.CHANGE)


@pytest.fixture(autouse=True)
def ignore_memory_pools(monkeypatch):
    """Make the change compute as if the model runner had not yet created its memory pools (requests and KV cache).

    In a server, the change records the sizes of the pools when the model runner creates them. In these tests, the model
    runner created its pools before the change was installed, so the change uses 0 for each size.
    """
    outcome = probe(cutedsl_sizing.CHANGE)
    if outcome.status is Status.NATIVE:
        pytest.skip(f"nothing to bound or to share: {outcome.reason}")
    monkeypatch.setattr(wrapper, "_largest_pools", Pools())


def experts(model):
    return [layer.mlp.experts for layer in model.model.layers if hasattr(layer.mlp, "experts")]


def large_buffers():
    sizes = {"chunked_prefill_size": 512, "max_prefill_tokens": 512}
    return {"moe_runner_backend": "flashinfer_cutedsl", **sizes, **graph_arguments(512)}


def small_buffers():
    return {"chunked_prefill_size": 64, "max_prefill_tokens": 64, "max_running_requests": 4, **graph_arguments(4)}


def run(engine, path, *changes, steps=STEPS, **arguments):
    """Load a model. Return three values: its greedy tokens, its logits of all steps, and the model."""
    with engine.override_arguments(**{**large_buffers(), **arguments}), installed(*changes):
        model = engine.load(path)
        return *engine.generate(model, PROMPTS, steps), model


@pytest.fixture(scope="module")
def stock(engine, checkpoint):
    """Function that returns the stock engine's tokens, logits and model. It caches the results of each checkpoint."""
    return functools.cache(lambda **options: run(engine, checkpoint(**options)))


@contextmanager
def poison_buffers(monkeypatch):
    """Context manager that fills the buffers of FlashInfer's wrapper, and the layer's output, with NaN whenever the
    kernels of a layer start."""
    run_into = SharedMoE._run_into

    def poison(self, output, arguments):
        self._wrapper._gemm1_output.fill_(255)
        self._wrapper._gemm1_output_scale.fill_(255)
        output.fill_(float("nan"))
        return run_into(self, output, arguments)

    with monkeypatch.context() as patch:
        patch.setattr(SharedMoE, "_run_into", poison)
        yield


def wrappers(model):
    return {layer._cutedsl_wrapper for layer in experts(model)}


@pytest.mark.parametrize("dense_layers", [0, 1])
def test_one_shared_wrapper_gives_the_answers_of_one_wrapper_per_layer(
    engine, checkpoint, stock, monkeypatch, dense_layers
):
    path = checkpoint(dense_layers=dense_layers)
    right = stock(dense_layers=dense_layers)
    assert len(wrappers(right[2])) == 4 - dense_layers
    with poison_buffers(monkeypatch):
        patched = run(engine, path, *CHANGES)
    (shared,) = wrappers(patched[2])
    assert same_answers(right, patched)
    assert same_answers(
        right, run(engine, path, cutedsl_sizing.CHANGE)
    )  # without an offered buffer, each output is a new tensor
    # The shared buffers are smaller than the buffers of one stock layer, because they include no output buffer.
    assert 0 < (4 - dense_layers) * workspace_bytes({shared._wrapper}) < workspace_bytes(wrappers(right[2]))


def test_flashinfers_own_output_buffer_is_never_allocated(engine, checkpoint, monkeypatch):
    """With the change, FlashInfer never allocates its output buffer. The stock engine allocates this buffer after the
    KV cache, when little memory is free. With data-parallel ranks it is the largest buffer.
    """
    shapes, empty = [], torch.empty

    def recording(*size, **how):
        tensor = empty(*size, **how)
        shapes.append((tuple(tensor.shape), tensor.device.type))
        return tensor

    monkeypatch.setattr(wrapper, "_shared", WeakValueDictionary())  # the wrapper of another test may still be alive
    with engine.override_arguments(**large_buffers()), installed(*CHANGES):
        layer = experts(engine.load(checkpoint(dense_layers=0)))[0]
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", recording)
            layer.quant_method.apply(layer, make_dispatch_output(layer, 0))
    shape = (layer._cutedsl_wrapper.max_num_tokens, layer.hidden_size)
    assert (shape, "meta") in shapes
    assert (shape, "cpu") not in shapes


def make_dispatch_output(layer, seed, tokens=4):
    """Return a random output of the engine's dispatcher, as a layer's quantization method receives it."""
    from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, layer.num_experts, generator=generator).topk(layer.top_k).indices.to(torch.int32)
    top_k = StandardTopKOutput(torch.rand(tokens, layer.top_k, generator=generator), ids, torch.empty(0))
    return StandardDispatchOutput(torch.randn(tokens, layer.hidden_size, generator=generator).bfloat16(), None, top_k)


@pytest.mark.parametrize("separate_outputs", [True, False])
def test_a_layers_output_outlives_the_next_layers_run(engine, checkpoint, monkeypatch, separate_outputs):
    """A layer's output stays valid while the next layer runs. A draft model reads such outputs (the target's hidden
    states), and a pipeline stage sends them.

    All layers share one FlashInfer wrapper. Each call of the wrapper must therefore return a new output. The case
    ``separate_outputs=False`` tests the test: it makes all calls return the same buffer, and expects that the second
    layer then overwrites the first layer's output.
    """
    if not separate_outputs:
        own = torch.empty(4, 256, dtype=torch.bfloat16)
        monkeypatch.setattr(wrapper, "_allocate_output", lambda shape, dtype, device: own.view(shape))
    with engine.override_arguments(**large_buffers()), installed(*CHANGES):
        first, second = experts(engine.load(checkpoint(dense_layers=0)))[:2]
        output = first.quant_method.apply(first, make_dispatch_output(first, 0)).hidden_states
        before = output.clone()
        second.quant_method.apply(second, make_dispatch_output(second, 1))
    assert torch.equal(output, before) == separate_outputs


def test_a_draft_model_in_the_same_process_shares_and_changes_nothing(engine, checkpoint, stock, monkeypatch):
    """A target and a draft model that share one wrapper give the same answers as each model alone."""
    target_and_draft = ({"dense_layers": 0}, {"dense_layers": 0, "seed": 7})
    alone = [stock(**options) for options in target_and_draft]
    with engine.override_arguments(**large_buffers()), installed(*CHANGES), poison_buffers(monkeypatch):
        models = [engine.load(checkpoint(**options)) for options in target_and_draft]
        for turn in (0, 1, 0):
            assert same_answers(engine.generate(models[turn], PROMPTS, STEPS), alone[turn])
        assert len(wrappers(models[0]) | wrappers(models[1])) == 1
    assert alone[0][0] != alone[1][0]


def test_buffers_are_freed_with_the_models_that_used_them(engine, checkpoint):
    model = run(engine, checkpoint(dense_layers=0), *CHANGES, steps=0)[2]
    before = len(wrapper._shared)
    assert before
    del model
    engine.runner.model = None
    gc.collect()
    assert len(wrapper._shared) < before


def test_layers_that_overlap_in_time_do_not_share(engine, checkpoint):
    from sglang.srt.layers.moe.moe_runner import flashinfer_cutedsl

    with engine.override_arguments(**large_buffers()), installed(*CHANGES):
        model = engine.load(checkpoint(dense_layers=0))
        for options, count in (({}, 1), ({"enable_two_batch_overlap": True}, 4), ({"enable_pdmux": True}, 4)):
            with engine.override_arguments(**options):
                for layer in experts(model):
                    layer._cutedsl_wrapper = None
                    flashinfer_cutedsl.ensure_cutedsl_wrapper(layer)
            assert len(wrappers(model)) == count, options


def test_a_larger_forward_runs_in_slices_with_one_warning(engine, checkpoint, stock, caplog):
    path = checkpoint(dense_layers=0)
    with pytest.raises(ValueError, match=r"num_tokens \(176\) exceeds max_num_tokens \(64\)"):
        run(engine, path, **small_buffers())
    with caplog.at_level(logging.WARNING, "sglang.srt.moe_patches"):
        patched = run(engine, path, *CHANGES, **small_buffers())
    assert [layer._cutedsl_wrapper.max_num_tokens for layer in experts(patched[2])] == [64] * 4
    assert same_answers(stock(dense_layers=0), patched)
    messages = [record.message for record in caplog.records if "cutedsl-sizing" in record.message]
    assert len(messages) == 1
    assert f"{TOKENS} tokens" in messages[0]
    assert f"--max-prefill-tokens {TOKENS}" in messages[0]


def test_a_graph_that_does_not_fit_is_refused_before_its_capture(engine, checkpoint, monkeypatch):
    name = next(filter(has_module, wrapper._CAPTURE_MODULES))
    monkeypatch.setattr(f"{name}.is_capture_mode", True)  # the engine sets this before the warm-up runs
    with pytest.raises(ValueError, match="--max-prefill-tokens 176"):
        run(engine, checkpoint(dense_layers=0), *CHANGES, steps=0, **small_buffers())


def test_a_buffer_that_contains_the_moe_input_is_not_used(engine, checkpoint, monkeypatch):
    """An offered buffer that overlaps the MoE input is not used, because the shared experts may read the input after
    the routed experts have written their output.
    """
    taken = []
    take = channel.take_output
    monkeypatch.setattr(channel, "take_output", lambda *a, **k: taken.append(take(*a, **k)) or taken[-1])
    with engine.override_arguments(**large_buffers()), installed(*CHANGES):
        layer = experts(engine.load(checkpoint(dense_layers=0)))[0]
        given = make_dispatch_output(layer, 0)
        for buffer in (torch.empty_like(given.hidden_states), given.hidden_states):
            with channel.moe_output_buffer_ctx(buffer):
                layer.quant_method.apply(layer, given)
    assert [found is not None for found in taken] == [True, False]


def test_the_bound_includes_the_pools_of_the_model_runner(engine):
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(size=300),
        max_total_num_tokens=8192,
        model_config=SimpleNamespace(context_len=1024),
        server_args=engine.server_args,
    )
    wrapper._wrap_init_memory_pool(lambda self: None)(runner)
    assert wrapper._largest_pools == Pools(300, 8192, 1024)
    with installed(*CHANGES), engine.override_arguments(**small_buffers()):
        assert compute_max_forward_tokens(read_forward_limits(engine.server_args, wrapper._largest_pools)) == 300
        assert bound(engine.server_args) == engine.server_args.cutedsl_moe_max_num_tokens() == 64


# --- The server's arguments ------------------------------------------------------------------------------------------


def bound(args):
    """Return the number of tokens for which the change allocates buffers, if the model runner has not yet chosen the
    sizes of its memory pools.
    """
    return compute_max_forward_tokens(read_forward_limits(args, Pools()))


@pytest.fixture
def server_args():
    from sglang.srt.server_args import ServerArgs

    def make(**given):
        args = ServerArgs(model_path="dummy")
        vars(args).update(given)
        return args

    with installed(cutedsl_sizing.CHANGE):
        yield make


EAGLE = {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 4}
ADAPTIVE = {**EAGLE, "speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_adaptive": True}
DP_ATTENTION = {"enable_dp_attention": True}
UNCHUNKED = {"chunked_prefill_size": -1, "model_config": SimpleNamespace(context_len=3000)}


@pytest.mark.parametrize(
    ("graphs", "more", "expected"),
    [
        ((512, 2048), {"max_prefill_tokens": 16384}, 16384),
        ((512, 512), EAGLE | {"speculative_num_draft_tokens": 8}, 4096),
        ((64,), {}, 512),
    ],
)
def test_the_bound_is_upstreams_number_if_its_terms_are_the_largest(server_args, graphs, more, expected):
    args = server_args(**{"max_prefill_tokens": 512} | more, **graph_arguments(*graphs))
    assert bound(args) == args.cutedsl_moe_max_num_tokens() == expected


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"chunked_prefill_size": 700}, 700),
        (UNCHUNKED, 3000),
        ({**UNCHUNKED, "disable_radix_cache": True}, 3511),
        ({**DP_ATTENTION, "max_running_requests": 4096, "dp_size": 4, "tp_size": 4}, 1024),
        ({"max_running_requests": 600}, 600),
        ({**DP_ATTENTION, "max_prefill_tokens": 513, "dp_size": 2, "tp_size": 8}, 516),
        ({**EAGLE, "speculative_eagle_topk": 16}, 1024),
        ({**ADAPTIVE, "max_running_requests": 128}, 1024),  # the engine's own candidates have up to 7 steps
    ],
)
def test_each_flag_raises_the_bound_above_upstreams_number(server_args, more, expected):
    """Each of these server arguments raises this package's bound on the tokens in a forward pass. With these arguments,
    the bound of later engine releases (``cutedsl_moe_max_num_tokens``) is too small, so the package uses its own.
    """
    args = server_args(**{"max_prefill_tokens": 512, **graph_arguments(64), **more})
    assert bound(args) == expected
    own = probe(cutedsl_sizing.CHANGE).status is Status.HARDENED
    assert (args.cutedsl_moe_max_num_tokens() < expected) == own


def test_prefill_graphs_of_every_kind_raise_the_bound(server_args):
    """CUDA graphs of prefills raise this package's bound on the tokens in a forward pass, whether the graphs are
    piecewise or not. The bound of newer engine releases ignores prefill graphs that are not piecewise.
    """
    graphs = graph_arguments(4, 2048)
    if "cuda_graph_config" not in graphs:
        pytest.skip("this release captures piecewise prefills only")
    for backend, expected in (("tc_piecewise", 2048), ("breakable", 2048), ("full", 2048), ("disabled", 512)):
        graphs["cuda_graph_config"].prefill.backend = backend
        assert bound(server_args(max_prefill_tokens=512, **graphs)) == expected


@pytest.mark.every_release
def test_the_page_states_the_installed_engines_default_budget():
    """The page docs/changes/cutedsl-sizing.md states the engine's default token budget: the largest number of tokens
    per rank for FlashInfer's dispatcher. The page must agree with the installed engine's code.

    The default is 1,024 up to 0.5.12.post1. In later releases it is at least 4,096, and the engine itself sizes
    CuteDSL's buffers.
    """
    page = (Path(__file__).parents[3] / "docs/changes/cutedsl-sizing.md").read_text()
    dispatcher = engine_code.import_module("sglang.srt.layers.moe.token_dispatcher.flashinfer")
    overrides = [dispatcher]
    if engine_code.has_module("sglang.srt.arg_groups.overrides"):
        overrides.append(engine_code.import_module("sglang.srt.arg_groups.overrides"))
    code = "".join(inspect.getsource(module) for module in overrides)
    earlier, later = f'get_int_env_var("{BUDGET.name}", 1024)' in code, re.search(r"max\(.*, 4096\)", code)
    assert bool(earlier) != bool(later)
    assert is_sized_by_engine(engine_code.import_module("sglang.srt.server_args").ServerArgs) == bool(later)
    assert ("1,024 tokens up to" if earlier else "at least 4,096 tokens") in page
    assert BUDGET.read({}) == 1024 or later
    assert BUDGET.default == ""


def test_a_budget_that_is_too_small_is_refused_with_the_command_that_fixes_it(server_args, monkeypatch):
    """The server does not start if the token budget of FlashInfer's dispatcher is too small for the server's prefills.
    The error contains the command that sets a sufficient budget, in tokens per rank. In this test, prefills of 16,385
    tokens on 8 ranks need 2,049 tokens per rank.

    If the engine release does not check the budget, this package does.
    """
    args = server_args(
        **{"moe_runner_backend": "flashinfer_cutedsl", "moe_a2a_backend": "flashinfer", "ep_size": 8, "tp_size": 8},
        **{"max_prefill_tokens": 16385, "chunked_prefill_size": 8192, "page_size": 1, "enable_grpc": False},
        **{"disaggregation_mode": "null", "served_model_name": "dummy", **graph_arguments(512)},
    )
    check = getattr(args, "_validate_cutedsl_a2a_token_budget", args.check_server_args)
    monkeypatch.delenv(BUDGET.name, raising=False)
    with pytest.raises(ValueError, match=f"export {BUDGET.name}=2049"):
        check()
    monkeypatch.setenv(BUDGET.name, "2048")
    with pytest.raises(ValueError, match="2049"):
        check()
    monkeypatch.setenv(BUDGET.name, "2049")
    check()


def test_the_change_only_hardens_a_release_that_sizes_buffers_by_itself(server_args):
    from sglang.srt.server_args import ServerArgs

    # The fixture installs this package's method. The change must not mistake this method for one of the engine.
    own = ServerArgs.cutedsl_moe_max_num_tokens is not launcher._cutedsl_moe_max_num_tokens
    assert probe(cutedsl_sizing.CHANGE).status is (Status.HARDENED if own else Status.APPLIED)
