"""GPU tests of column slices with the Triton runner: the same bits as the engine's own function, in less memory.

Without a GPU, the tests run the engine's kernels in Triton's interpreter (TRITON_INTERPRET=1), with plain PyTorch
instead of the engine's CUDA functions. The data type is then float16, because the interpreter computes bfloat16
incorrectly. The unit test `test_gpu_tests_of_both_runners_pass_in_the_interpreter` runs this file in the interpreter.
Only `make test-all` also runs the tests with the mark `product`.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import os
import re
import threading
import warnings
from types import SimpleNamespace

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
torch = pytest.importorskip("torch")
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe", reason="needs the engine")

from moe_alignment import align  # noqa: E402
from patching import patched_by  # noqa: E402
from sglang_moe_patches.changes.moe_workspace import column_slices, deferred_tensor, streams, triton  # noqa: E402
from sglang_moe_patches.changes.moe_workspace.kernels import moe_sum  # noqa: E402
from sglang_moe_patches.core import fused_moe_call  # noqa: E402
from sglang_moe_patches.core.dead_input import channel, takers  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
CONFIG = {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 2}
if INTERPRETED:
    CONFIG |= {"BLOCK_SIZE_M": 64}  # few programs, because each takes milliseconds
else:
    CONFIG |= {"num_warps": 4, "num_stages": 2}


# --- The engine's sequence, run by itself ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def modules():
    """Object with the engine's modules of the fused-MoE function (``sequence``) and of its GEMM (``kernels``), and with
    the server arguments that they read (``arguments``).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang_moe_patches.core import engine

        module = engine.import_module(fused_moe_call.MODULE)
        kernels = engine.import_module(getattr(module, triton.INVOKE).__module__)
    arguments = SimpleNamespace(
        enable_fused_moe_sum_all_reduce=False, moe=SimpleNamespace(enable_fused_moe_sum_all_reduce=False)
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in ("get_global_server_args", "get_server_args", "get_exec"):
            patch.setattr(module, name, lambda: arguments, raising=False)
        for name in ("get_tp_group", "get_parallel"):
            patch.setattr(module, name, lambda: SimpleNamespace(tp_group=None), raising=False)
        patch.setattr(module, "is_allocation_symmetric", lambda: False, raising=False)
        patch.setattr(module, "use_symmetric_memory", lambda *a, **k: contextlib.nullcontext(), raising=False)
        if INTERPRETED:
            _stand_in(patch, module, kernels)
        yield SimpleNamespace(sequence=module, kernels=kernels, arguments=arguments)


def _stand_in(patch, module, kernels):
    """Replace the engine's functions that need CUDA by plain PyTorch."""

    def silu_and_mul(x, out, expert_ids=None, expert_step=1):
        gate, up = x.float().chunk(2, dim=-1)
        out.copy_((torch.nn.functional.silu(gate) * up).to(out.dtype))

    def moe_sum_reduce(x, out, scale):
        assert x.is_contiguous()
        assert out.is_contiguous()
        moe_sum.moe_sum_torch(x, out, scale)

    def quantized(x, top, dtype, dim):
        scale = x.float().abs().amax(dim, keepdim=True).clamp_min(1e-6) / top
        q = (x.float() / scale).clamp(-top, top)
        return (q.round() if dtype == torch.int8 else q).to(dtype), scale

    def per_token_group(top, dtype):
        def quantize(x, group):
            q, scale = quantized(x.view(len(x), -1, group), top, dtype, -1)
            return q.view(x.shape), scale.view(len(x), -1)

        return quantize

    def scaled_fp8_quant(x, scale=None, use_per_token_if_dynamic=False):
        if scale is not None:
            return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale
        q, scale = quantized(x, 448.0, torch.float8_e4m3fn, -1 if use_per_token_if_dynamic else (0, 1))
        return q, scale if use_per_token_if_dynamic else scale.view(1)

    for owner in (module, kernels):
        patch.setattr(owner, "_is_cuda", True)
    for owner, name, value in (
        (module, "silu_and_mul", silu_and_mul),
        (module, "moe_sum_reduce", moe_sum_reduce),
        (module, "is_arch_support_pdl", lambda: False),
        (kernels, "is_arch_support_pdl", lambda: False),
        (kernels, "scaled_fp8_quant", scaled_fp8_quant),
        (kernels, "sglang_per_token_group_quant_fp8", per_token_group(448.0, torch.float8_e4m3fn)),
        (kernels, "sglang_per_token_group_quant_int8", per_token_group(127.0, torch.int8)),
        (kernels, "per_token_quant_int8", lambda x: quantized(x, 127.0, torch.int8, -1)),
    ):
        patch.setattr(owner, name, value, raising=False)


def layer(
    tokens=40,
    experts=4,
    hidden=256,
    intermediate=32,
    top_k=3,
    kind="bf16",
    seed=0,
    config=CONFIG,
    ids=None,
    block=32,
    **more,
):
    """Return random arguments for the engine's fused-MoE function: weights, activations and routing."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE)

    def rand(*shape):
        return (torch.rand(*shape, generator=generator) + 0.5).to(DEVICE)

    w1, w2 = randn(experts, 2 * intermediate, hidden) / hidden**0.5, randn(experts, hidden, intermediate)
    given = {}
    small_1, small_2 = (300, 30) if kind.startswith("int8") or kind == "w8a16" else (1, 1)
    if kind == "bf16":
        w1, w2 = w1.to(DTYPE), w2.to(DTYPE)
    elif kind.startswith("fp8"):
        w1, w2 = w1.to(torch.float8_e4m3fn), w2.to(torch.float8_e4m3fn)
        given["use_fp8_w8a8"] = True
    elif kind.startswith("int8") or kind == "w8a16":
        w1, w2 = (w1 * 300).to(torch.int8), (w2 * 30).to(torch.int8)
        given["use_int8_w8a16" if kind == "w8a16" else "use_int8_w8a8"] = True
    elif kind.startswith("w4a16"):
        w1, w2 = ((w.view(torch.int32)[..., ::2] & 255).to(torch.uint8).contiguous() for w in (w1, w2))
        given["use_int4_w4a16"] = True
    if kind in ("fp8-block", "int8-block"):
        given |= {
            "block_shape": [32, block],
            "w1_scale": rand(experts, 2 * intermediate // 32, hidden // block) / small_1,
            "w2_scale": rand(experts, -(-hidden // 32), intermediate // block) / small_2,
        }
    elif kind in ("fp8-channel", "int8-channel"):
        given |= {
            "per_channel_quant": True,
            "w1_scale": rand(experts, 2 * intermediate, 1) / small_1,
            "w2_scale": rand(experts, hidden, 1) / small_2,
        }
    elif kind in ("fp8-tensor", "fp8-static"):
        given |= {"w1_scale": rand(experts), "w2_scale": rand(experts)}
        if kind == "fp8-static":
            given |= {"a1_scale": rand(1), "a2_scale": rand(1)}
    elif kind == "w8a16":
        given |= {"w1_scale": rand(experts, 2 * intermediate) / small_1, "w2_scale": rand(experts, hidden) / small_2}
    elif kind.startswith("w4a16"):
        given |= {
            "block_shape": [0, 32],
            "w1_scale": (rand(experts, 2 * intermediate, hidden // 32) / 8).to(DTYPE),
            "w2_scale": (rand(experts, hidden, intermediate // 32) / 8).to(DTYPE),
        }
        if kind == "w4a16-zero-points":
            for name, rows, inner in (("w1_zp", 2 * intermediate, hidden), ("w2_zp", hidden, intermediate)):
                given[name] = torch.randint(0, 256, (experts, rows // 2, inner // 32), generator=generator).to(
                    DEVICE, torch.uint8
                )
    if ids is None:
        ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
    order, owners = align(ids, config["BLOCK_SIZE_M"], experts)
    sorted_ids, owners, padded = (
        torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in (order, owners, [len(order)])
    )
    given |= {
        "hidden_states": randn(tokens, hidden).to(DTYPE),
        "w1": w1,
        "w2": w2,
        "topk_weights": torch.softmax(randn(tokens, top_k), -1),
        "topk_ids": ids.to(DEVICE, torch.int32),
        "sorted_token_ids": sorted_ids,
        "expert_ids": owners,
        "num_tokens_post_padded": padded,
        "config": dict(config),
        "down_config": None,
        "activation": "silu",
        "is_gated": True,
        "routed_scaling_factor": 2.5,
        "filter_expert": False,
    }
    return given | more


def run(modules, given):
    """Run the fused-MoE function, with the patches that are installed now, on a copy of the input. Return the
    output.
    """
    sequence = getattr(modules.sequence, triton.FUSED_MOE)
    # Options that this layer does not set are off, as in the engine's own calls.
    off = dict.fromkeys(inspect.signature(sequence).parameters)
    off |= {
        name: False for name in off if name.startswith(("use_", "no_", "per_", "apply_", "in", "down_moe", "up_moe"))
    }
    defaults = {n: p.default for n, p in inspect.signature(sequence).parameters.items() if p.default is not p.empty}
    return sequence(**off | defaults | given | {"hidden_states": given["hidden_states"].clone()})


@pytest.fixture
def lower_thresholds(monkeypatch):
    """Lower the thresholds, so that the tests' small tensors count as large."""
    monkeypatch.setattr(column_slices, "MIN_TENSOR_BYTES", 1)
    monkeypatch.setattr(column_slices, "MIN_BYTES_SAVED_PER_SLICE", 1)
    monkeypatch.setattr(column_slices, "MAX_SLOWDOWN_FRACTION", math.inf)
    monkeypatch.setattr(column_slices, "SLICE_ALIGNMENT_COLUMNS", 64)


@pytest.fixture(autouse=True)
def replace_slow_kernels(monkeypatch, request):
    """Replace this package's sum kernel by plain PyTorch if Triton's interpreter runs the tests. The interpreted kernel
    would take half of the tests' time. Tests of the kernel itself still run it.
    """
    if INTERPRETED and not re.search("our_sum|bf16-True", request.node.name):
        monkeypatch.setattr(moe_sum, "moe_sum", moe_sum.moe_sum_torch)


@pytest.fixture
def slice_counts(monkeypatch):
    """List of numbers. Each time the change chooses the column slices of an output tensor, their number is
    appended."""
    counts = []
    slices = deferred_tensor.choose_column_slices

    def counted(deferred, output):
        found = slices(deferred, output)
        counts.append(len(found))
        return found

    monkeypatch.setattr(deferred_tensor, "choose_column_slices", counted)
    return counts


def install_column_slices():
    return patched_by(triton.plan().install)


def run_both(modules, given):
    """Return two outputs for the same arguments: of the engine's function, and of the patched function in column
    slices.
    """
    stock = run(modules, given)
    with install_column_slices():
        return stock, run(modules, given)


def same_bits(a, b):
    return a.shape == b.shape and torch.equal(a.view(torch.int16), b.view(torch.int16))


# --- The same bits ---------------------------------------------------------------------------------------------------


KINDS = (
    *("bf16", "fp8-block", "fp8-channel", "fp8-tensor", "fp8-static"),
    *("int8-channel", "int8-block", "w8a16", "w4a16"),
)
KINDS_ONLY_IN_TEST_ALL = ("fp8-static", "int8-channel", "int8-block")
"""Quantizations that resemble another tested quantization. Only `make test-all` tests them."""


def product(*case):
    return pytest.param(*case, marks=pytest.mark.product)


@pytest.mark.usefixtures("lower_thresholds")
@pytest.mark.parametrize(
    ("kind", "inplace"),
    [
        *((kind, False) for kind in KINDS if kind not in KINDS_ONLY_IN_TEST_ALL),
        ("bf16", True),
        *(product(kind, False) for kind in KINDS_ONLY_IN_TEST_ALL),
        product("fp8-block", True),
    ],
)
def test_column_slices_give_the_same_bits(modules, slice_counts, kind, inplace):
    stock, ours = run_both(modules, layer(kind=kind, inplace=inplace))
    assert torch.isfinite(stock).all()
    assert slice_counts == [2 if "block" in kind else 4]  # a slice has a multiple of four block scales
    assert same_bits(stock, ours)


def route_elsewhere():
    """Return the routing's expert ids, with -1 for experts on other ranks. All experts of row 7 are on other ranks."""
    ids = layer()["topk_ids"].cpu().clone()
    ids[ids >= 3] = -1
    ids[7] = -1
    return ids


@pytest.mark.usefixtures("lower_thresholds")
@pytest.mark.parametrize(
    ("more", "slices"),
    [
        pytest.param({"routed_scaling_factor": None}, 4, id="no factor"),
        pytest.param({"apply_router_weight_on_input": True}, 4, id="weights on the input"),
        pytest.param({"top_k": 4}, 4, id="top-k of 4"),
        pytest.param({"hidden": 352}, 6, id="the last slice narrower, and the tile in it cut off"),
        pytest.param({"tokens": 33, "intermediate": 64}, 2, id="few tokens"),
        pytest.param({"down_config": {**CONFIG, "BLOCK_SIZE_N": 128}}, 2, id="other tiles for the second GEMM"),
        pytest.param({"activation": "relu2", "is_gated": False}, 4, id="no gate"),
        pytest.param({"biases": True}, 4, id="biases"),
        pytest.param({"filter_expert": True}, 4, id="experts of other ranks"),
    ],
)
def test_all_options_of_the_fused_moe_function_give_stock_results(modules, slice_counts, more, slices):
    if more.get("is_gated") is False:
        more = {**more, "w1": layer(intermediate=16)["w1"]}
    if more.get("filter_expert"):
        more = {**more, "ids": route_elsewhere()}
    if more.get("biases"):
        b1, b2 = (torch.randn(4, columns, device=DEVICE).to(DTYPE) for columns in (64, 256))
        more = {"b1": b1, "b2": b2}
    stock, ours = run_both(modules, layer(**more))
    assert slice_counts == [slices]
    assert same_bits(stock, ours)
    if "b2" in more:
        assert not same_bits(stock, run(modules, layer(**more | {"b2": more["b2"].flip(1)})))
    assert not more.get("filter_expert") or not ours[7].any()


@pytest.mark.usefixtures("lower_thresholds")
def test_an_activation_inside_the_first_gemm_leaves_the_expert_outputs_deferred(modules, slice_counts, monkeypatch):
    """If the engine runs the activation inside the first GEMM, it allocates one tensor less. The change must still
    replace the tensor for the expert outputs by a ``DeferredTensor``, and compute it in column slices. The engine has
    this option from 0.5.20 on, off by default.
    """
    if "fuse_swiglu_interleaved" not in inspect.signature(getattr(modules.sequence, triton.FUSED_MOE)).parameters:
        pytest.skip("not in this release")
    invoke = getattr(modules.sequence, triton.INVOKE)

    def activating(activations, weights, bias, output, *args, fuse_swiglu, **kwargs):
        """Stand-in for the engine's GEMM that includes the activation. The engine's kernel requires bfloat16, which the
        interpreter computes incorrectly.
        """
        if not fuse_swiglu:
            return invoke(activations, weights, bias, output, *args, fuse_swiglu=False, **kwargs)
        both_halves = output.new_empty(len(output), 2 * output.shape[1])
        invoke(activations, weights, bias, both_halves, *args, fuse_swiglu=False, **kwargs)
        gate, up = both_halves[:, ::2].float(), both_halves[:, 1::2]
        return output.copy_((torch.nn.functional.silu(gate) * up).to(output.dtype))

    def make_arguments(inplace):
        return layer(fuse_swiglu_interleaved=True, inplace=inplace)

    def replace_engine_kernels(patch):
        if INTERPRETED:
            patch.setattr(modules.sequence, "_validate_fused_swiglu_interleaved", lambda **how: None)
            default = {"fuse_swiglu": False}
            patch.setattr(
                modules.sequence, triton.INVOKE, lambda *args, **kwargs: activating(*args, **default | kwargs)
            )

    with monkeypatch.context() as patch:
        replace_engine_kernels(patch)
        stock = [run(modules, make_arguments(inplace)) for inplace in (False, True)]
    with install_column_slices(), monkeypatch.context() as patch:
        # The engine's kernels are replaced only here, because ``patched()`` reads the function's source code.
        replace_engine_kernels(patch)
        ours = [run(modules, make_arguments(inplace)) for inplace in (False, True)]
    assert all(torch.isfinite(one).all() for one in stock)
    assert all(map(same_bits, stock, ours))
    assert not same_bits(stock[0], run(modules, layer()))
    assert slice_counts == [4, 4]


@pytest.mark.usefixtures("lower_thresholds")
@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter runs one thread at a time")
def test_forward_passes_in_two_threads_share_no_state(modules, slice_counts):
    given = [layer(seed=seed, kind=kind) for seed, kind in itertools.product((1, 2), ("bf16", "fp8-block"))]
    stock = [run(modules, one) for one in given]
    ours = [None] * len(given)

    def work(index):
        for _ in range(3):
            ours[index] = run(modules, given[index])

    with install_column_slices():
        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(given))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(map(same_bits, stock, ours))
    assert set(slice_counts) == {2, 4}


# --- An input that another stream reads ------------------------------------------------------------------------------


@pytest.fixture
def concurrent_reads(modules, monkeypatch):
    """Object with two attributes. ``watch`` makes another stream read the input during each GEMM, like shared experts
    that run at the same time. ``found`` has the values that were read, one entry for each GEMM.
    """
    found, side = [], None if INTERPRETED else torch.cuda.Stream()
    invoke = getattr(modules.sequence, triton.INVOKE)

    def watch(hidden):
        def watched(*args, **kwargs):
            if side is None:
                found.append(hidden.clone())
                return invoke(*args, **kwargs)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                found.append(hidden.clone())
            invoke(*args, **kwargs)
            torch.cuda.current_stream().wait_stream(side)

        monkeypatch.setattr(modules.sequence, triton.INVOKE, watched)

    return SimpleNamespace(found=found, watch=watch)


@pytest.mark.usefixtures("lower_thresholds")
@pytest.mark.parametrize("beside", [True, False])
def test_an_input_that_another_stream_reads_is_overwritten_only_after_the_last_gemm(
    modules, slice_counts, concurrent_reads, monkeypatch, beside
):
    monkeypatch.setattr(streams, "has_concurrent_reader", beside)
    given = layer(inplace=True)
    stock, hidden = run(modules, given), given["hidden_states"].clone()
    with install_column_slices():
        concurrent_reads.watch(hidden)
        ours = run_with_dead_input(modules, given, None, hidden)
    assert slice_counts == [4]
    assert ours.data_ptr() == hidden.data_ptr()
    assert same_bits(stock, ours)
    overwritten = [int((seen != given["hidden_states"]).any(0).sum()) for seen in concurrent_reads.found]
    assert overwritten == [0, 0, *([0, 0, 0] if beside else [64, 128, 192])]


@pytest.mark.usefixtures("lower_thresholds")
def test_an_out_of_place_output_is_written_at_once(modules, slice_counts, monkeypatch):
    monkeypatch.setattr(streams, "has_concurrent_reader", True)
    with Allocations() as ours:
        assert same_bits(*run_both(modules, layer()))
    assert slice_counts == [4]
    assert (40, 192) not in ours.sizes


# --- In the layer's dead input ---------------------------------------------------------------------------------------


def run_with_dead_input(modules, given, dead, hidden=None):
    """Run the fused-MoE function, with the patches that are installed now, while the tensor ``dead`` is offered as a
    dead input. Return the output.
    """
    hidden = given["hidden_states"].clone() if hidden is None else hidden
    given = {**given, "hidden_states": SimpleNamespace(clone=lambda: hidden)}
    with channel.moe_output_buffer_ctx(dead):
        return run(modules, given)


def nans(*shape):
    return torch.full(shape, math.nan, device=DEVICE, dtype=DTYPE)


def output_into_dead_input():
    """Return a context manager in which calls of the fused-MoE function write their output into the dead input.

    Calls that work in place are an exception. On servers with deferred-shared-experts, calls do not work in place.
    """
    return patched_by(takers.probe_triton())


@pytest.mark.usefixtures("lower_thresholds")
@pytest.mark.parametrize("kind", ["bf16", "fp8-block", product("int8-channel")])
def test_in_place_the_activation_lies_in_the_dead_input_with_the_same_bits(modules, slice_counts, kind):
    given = layer(kind=kind, inplace=True)
    stock, dead, hidden = run(modules, given), nans(40, 256), given["hidden_states"].clone()
    with install_column_slices(), Allocations() as made:
        ours = run_with_dead_input(modules, given, dead, hidden)
    assert slice_counts[0] > 1
    assert same_bits(stock, ours)
    assert channel.shares_storage(ours, hidden)
    assert kind != "bf16" or (120, 32) not in made.sizes  # otherwise the quantized activations have the same size
    assert not dead.view(-1)[: 120 * 32].isnan().any()
    assert dead.view(-1)[120 * 32 :].isnan().all()


@pytest.mark.parametrize(
    ("changes", "slices"),
    [
        ((install_column_slices,), 4),
        ((output_into_dead_input,), None),
        ((output_into_dead_input, install_column_slices), 4),
        ((install_column_slices, output_into_dead_input), 4),
        ((output_into_dead_input, install_column_slices), None),  # a small sequence
    ],
)
def test_not_in_place_the_output_lies_in_the_dead_input_with_the_same_bits(
    modules, slice_counts, request, changes, slices
):
    if slices:
        request.getfixturevalue("lower_thresholds")
    given = layer()
    stock, dead, hidden = run(modules, given), nans(40, 256), given["hidden_states"].clone()
    with contextlib.ExitStack() as stack:
        for change in changes:
            stack.enter_context(change())
        ours = run_with_dead_input(modules, given, dead, hidden)
    assert slice_counts == ([slices] if slices else [])
    assert channel.shares_storage(ours, dead)
    assert same_bits(stock, ours)
    assert torch.equal(hidden, given["hidden_states"])  # the shared experts read the input now


UNUSABLE = {
    "too small": lambda hidden: nans(120 * 32 // 256 - 1, 256),
    "a view": lambda hidden: nans(80, 256)[:40],
    "the MoE input": lambda hidden: hidden,
}


@pytest.mark.usefixtures("lower_thresholds")
@pytest.mark.parametrize(
    ("inplace", "unusable"),
    [
        *((inplace, "the MoE input") for inplace in (False, True)),
        *((True, "too small"), (False, "a view")),
        *(product(False, "too small"), product(True, "a view")),
    ],
)
def test_memory_that_is_not_a_dead_input_is_left_alone(modules, slice_counts, unusable, inplace):
    given = layer(inplace=inplace)
    stock, hidden = run(modules, given), given["hidden_states"].clone()
    dead = UNUSABLE[unusable](hidden)
    with output_into_dead_input(), install_column_slices():
        ours = run_with_dead_input(modules, given, dead, hidden)
    assert slice_counts == [4]
    assert same_bits(stock, ours)
    assert dead is hidden or dead.isnan().all()
    assert inplace or torch.equal(hidden, given["hidden_states"])


@pytest.mark.usefixtures("lower_thresholds")
@pytest.mark.parametrize("inplace", [False, True])
def test_overwriting_the_moe_input_changes_the_answers(modules, inplace, monkeypatch):
    given = layer(inplace=inplace)
    stock, hidden = run(modules, given), given["hidden_states"].clone()
    monkeypatch.setattr(channel, "withdraw_if_shared", lambda moe_input: None)
    with install_column_slices():
        ours = run_with_dead_input(modules, given, hidden, hidden)
    assert not (same_bits(stock, ours) if inplace else torch.equal(hidden, given["hidden_states"]))


# --- These tests can fail --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("lower_thresholds")
def test_a_lost_slice_changes_the_result(modules, slice_counts, monkeypatch):
    monkeypatch.setattr(
        column_slices, "split_columns", lambda hidden, width: [(c, c + width) for c in range(0, hidden - width, width)]
    )
    stock, ours = run_both(modules, layer())
    assert slice_counts == [3]
    assert not same_bits(stock, ours)


@pytest.mark.usefixtures("lower_thresholds")
def test_another_tile_size_changes_the_bits(modules, slice_counts, monkeypatch):
    """With other tile sizes than the engine chose for the whole tensor, the bits of the output change, because the GEMM
    adds in another order. The slices must therefore use the engine's tile sizes.
    """
    given = layer(kind="fp8-block", intermediate=128, block=64, config={**CONFIG, "BLOCK_SIZE_K": 64}, hidden=512)
    stock, ours = run_both(modules, given)
    assert same_bits(stock, ours)
    slices = deferred_tensor.choose_column_slices

    def with_other_tiles(deferred, output):
        gemm = deferred.gemm
        config = {**gemm.tiles, "BLOCK_SIZE_K": 32}
        deferred.gemm = gemm._replace(rest=tuple(config if one is gemm.tiles else one for one in gemm.rest))
        return slices(deferred, output)

    monkeypatch.setattr(deferred_tensor, "choose_column_slices", with_other_tiles)
    with install_column_slices():
        assert not same_bits(stock, run(modules, given))
    assert slice_counts == [2, 2]


# --- What is left alone, and what is not allocated -------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """PyTorch mode that records the sizes of all allocated tensors, in order."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.empty_like):
            self.sizes.append(tuple(args[0].shape if isinstance(args[0], torch.Tensor) else args[0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("lower_thresholds")
def test_no_tensor_of_the_full_size_is_made(modules, slice_counts):
    given = layer(inplace=True)
    with Allocations() as stock:
        run(modules, given)
    with install_column_slices(), Allocations() as ours:
        run(modules, given)
    assert (40, 3, 256) in stock.sizes
    assert (40, 3, 256) not in ours.sizes
    assert (40 * 3 * 64,) in ours.sizes
    assert max(map(math.prod, ours.sizes)) < 40 * 3 * 256


@pytest.mark.usefixtures("lower_thresholds")
@pytest.mark.parametrize(
    ("in_kernel", "more", "stock_tensors"), [(False, {"no_combine": True}, 2), (True, {"inplace": True}, 1)]
)
def test_no_unwritten_tensor_is_allocated(modules, slice_counts, monkeypatch, in_kernel, more, stock_tensors):
    """The patched function does not allocate a tensor that the stock function allocates, but never writes.

    The stock function allocates such a tensor in two cases: the caller needs no sum over a token's experts
    (``no_combine``), or the GEMM kernel computes this sum.
    """
    monkeypatch.setattr(modules.arguments, "enable_fused_moe_sum_all_reduce", in_kernel)
    monkeypatch.setattr(modules.arguments.moe, "enable_fused_moe_sum_all_reduce", in_kernel)
    given = layer(**more)
    with Allocations() as stock:
        expected = run(modules, given)
    with install_column_slices(), Allocations() as ours:
        output = run(modules, given)
    assert stock.sizes.count((40, 3, 256)) == stock_tensors
    assert ours.sizes.count((40, 3, 256)) == stock_tensors - 1
    assert slice_counts == []
    if INTERPRETED or not in_kernel:  # on a GPU, atomics add in random order
        assert same_bits(expected, output)
    else:
        torch.testing.assert_close(expected, output, rtol=0.05, atol=0.05)


def hooks():
    return SimpleNamespace(after_gate_up=None, after_down=lambda inner, experts_output, *_: experts_output.mul_(2))


@pytest.mark.usefixtures("lower_thresholds")
@pytest.mark.parametrize(
    ("more", "reached"),
    [
        pytest.param({"top_k": 2, "routed_scaling_factor": 1.0}, False, id="top-k of 2"),
        pytest.param({"top_k": 2}, False, id="top-k of 2, scaled", marks=pytest.mark.product),
        pytest.param({"top_k": 1, "routed_scaling_factor": 1.0}, False, id="top-k of 1"),
        pytest.param({"tokens": 32}, False, id="few tokens"),
        pytest.param({"hooks": hooks()}, False, id="hooks"),
        pytest.param({"kind": "w4a16-zero-points"}, True, id="zero points"),
    ],
)
def test_small_and_unsupported_calls_do_not_run_in_slices(modules, slice_counts, monkeypatch, more, reached):
    if more.get("tokens") == 32:  # the engine compiles this sum, which then adds in another order
        monkeypatch.setattr(
            modules.sequence, "moe_sum_reduce_torch_compile", lambda x, out, scale: moe_sum.moe_sum_torch(x, out, scale)
        )
    stock, ours = run_both(modules, layer(**more))
    assert slice_counts == ([1] if reached else [])
    assert same_bits(stock, ours)


@pytest.mark.parametrize("tokens", [pytest.param(40, id="small"), pytest.param(400, id="691 kB of the 1 MB allowed")])
def test_if_one_slice_is_best_the_engines_own_function_runs(modules, slice_counts, monkeypatch, tokens):
    if tokens > 40:
        monkeypatch.setenv(column_slices.MOE_WORKSPACE_MB.name, "1")
    stock, ours = run_both(modules, layer(tokens=tokens))
    assert slice_counts == []
    assert same_bits(stock, ours)


@pytest.mark.usefixtures("lower_thresholds")
@pytest.mark.parametrize(
    "kind", ["fp8-block", "fp8-channel", *map(product, ("fp8-tensor", "int8-channel", "int8-block"))]
)
def test_activations_are_quantized_once_for_each_gemm(modules, slice_counts, monkeypatch, kind):
    calls = []
    for name in triton._QUANTIZERS:
        if original := getattr(modules.kernels, name, None):

            def counted(*args, _original=original, **kwargs):
                calls.append(args[0].shape)
                return _original(*args, **kwargs)

            monkeypatch.setattr(modules.kernels, name, counted)
    given = layer(kind=kind)
    with install_column_slices():
        run(modules, given)
    assert slice_counts == [2 if "block" in kind else 4]
    assert calls == [(40, 256), (120, 32)]


# --- The sum ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("top_k", "columns_", "scale"),
    [
        *((3, 64, 1.0), (8, 896, 2.827), (9, 1024, 2.827), (6, 1500, 1.0), (5, 1, 2.827)),
        *(product(3, 64, 2.827), product(8, 896, 1.0), product(9, 1024, 1.0)),
        *(product(6, 1500, 2.827), product(5, 1, 1.0)),
    ],
)
def test_our_sum_is_the_engines_sum(top_k, columns_, scale):
    generator = torch.Generator().manual_seed(top_k)
    x = torch.randn(35, top_k, columns_, generator=generator).to(DEVICE, DTYPE)
    base = torch.full((35, columns_ + 48), 7.0, device=DEVICE, dtype=DTYPE)
    expected = torch.empty(35, columns_, device=DEVICE, dtype=DTYPE)
    moe_sum.moe_sum_torch(x, expected, scale)
    moe_sum.moe_sum(x, base[:, 16 : 16 + columns_], scale)
    assert same_bits(base[:, 16 : 16 + columns_].contiguous(), expected)
    assert (base[:, :16] == 7).all()
    assert (base[:, 16 + columns_ :] == 7).all()
    if not INTERPRETED and columns_ % 8 == 0:
        from sgl_kernel import moe_sum_reduce

        theirs = torch.empty_like(expected)
        moe_sum_reduce(x, theirs, scale)
        assert same_bits(theirs, expected)
