"""GPU tests of column slices with Marlin: the results equal those of the engine's own function, in less memory.

Without a GPU, a unit test runs these tests with TRITON_INTERPRET=1 and a stand-in for the compiled GEMM
(test/standins/marlin_moe.py). The bits of each column of the stand-in's result do not depend on other columns. The real
GEMM adds some sums in random order; a benchmark measures its error against float32.
"""

from __future__ import annotations
import __future__

import contextlib
import importlib
import math
import os
import warnings
from types import FunctionType, SimpleNamespace

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
torch = pytest.importorskip("torch")
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe", reason="needs the engine")

import marlin_moe as stand_in  # noqa: E402
import moe_alignment  # noqa: E402
from patching import patched_by  # noqa: E402
from sglang_moe_patches.changes.moe_workspace import column_slices, marlin, streams  # noqa: E402
from sglang_moe_patches.changes.moe_workspace.kernels import moe_sum, sum_and_copy  # noqa: E402
from sglang_moe_patches.core import engine, log  # noqa: E402
from sglang_moe_patches.core.dead_input import channel  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter computes bfloat16 incorrectly
ELSEWHERE = "sglang.srt.utils.custom_op"
_WITH_GEMM = ("sglang.kernels.ops.moe.moe_wna16_marlin", "sglang.jit_kernel.moe_wna16_marlin")


# --- The engine's function, run by itself ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def module():
    """The engine's module with Marlin's fused-MoE function, ready to run on this device."""
    found = importlib.import_module(marlin.MODULE)
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            library = _stand_in(patch, found)
        else:
            from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

            with contextlib.suppress(Exception):
                set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
            library = None
        yield found
        del library


def _stand_in(patch, module):
    """Replace the engine's functions that need CUDA by plain PyTorch. Return the library that registers the engine's
    operator for the CPU."""

    def silu_and_mul(x, out):
        gate, up = x.double().chunk(2, dim=-1)
        out.copy_((torch.nn.functional.silu(gate) * up).to(out.dtype))

    def moe_sum_reduce(x, out, scale):
        assert x.is_contiguous()
        moe_sum.moe_sum_torch(x, out, scale)

    jit = engine.import_module(*_WITH_GEMM)
    patch.setattr(jit, "_jit_moe_wna16_marlin_module", stand_in.compiled)
    patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    patch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=stand_in.SMS)
    )
    for name, value in (
        ("_is_cuda", True),
        ("moe_wna16_marlin_gemm", jit.moe_wna16_marlin_gemm),
        ("silu_and_mul", silu_and_mul),
        ("moe_sum_reduce", moe_sum_reduce),
        ("get_scalar_type", stand_in.scalar_type),
    ):
        patch.setattr(module, name, value, raising=False)

    def align(topk_ids, block, experts, **certificates):
        order, owners = moe_alignment.align(topk_ids, block, experts)
        tensors = order, owners, [len(order), owners.count(-1)]
        return tuple(torch.tensor(values, dtype=torch.int32) for values in tensors)

    patch.setattr("sglang.srt.layers.moe.fused_moe_triton.moe_align_block_size", align)
    with contextlib.suppress(ImportError):  # from 0.5.17 on
        sums = importlib.import_module("sglang.kernels.ops.moe.moe_topk_sum")
        patch.setattr(sums, "moe_topk_sum", lambda x, out: moe_sum_reduce(x, out, 1.0))
    function = marlin.find_function(module)
    library = torch.library.Library("sglang", "FRAGMENT")
    library.impl(marlin.NAME, function, "CPU")
    return library


def layer(
    tokens=40, experts=4, hidden=512, intermediate=128, top_k=3, kind="int4", *, gated=True, seed=0, ids=None, **more
):
    """Return random arguments for Marlin's fused-MoE function: weights, activations and routing."""
    generator = torch.Generator().manual_seed(seed)
    bits, group = (8, 32) if kind == "int8" else (4, 16 if kind == "nvfp4" else 32)

    def packed(k, n):
        words = n * 16 * bits // 32
        return torch.randint(-(2**31), 2**31 - 1, (experts, k // 16, words), generator=generator).to(torch.int32)

    def scales(k, n):
        one = 0.5 + torch.rand(experts, k // group, n, generator=generator)
        one *= k**-0.5 / (70 if bits == 8 else 4)
        if kind == "mxfp4":
            return one.log2().round().exp2().to(torch.float8_e8m0fnu)
        return (one * 1000).to(torch.float8_e4m3fn) if kind == "nvfp4" else one.to(DTYPE)

    gate = 2 * intermediate if gated else intermediate
    x = torch.randn(tokens, hidden, generator=generator)
    if ids is None:
        ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
    given = {
        "hidden_states": x.to(DTYPE),
        "w1": packed(hidden, gate),
        "w2": packed(intermediate, hidden),
        "w1_scale": scales(hidden, gate),
        "w2_scale": scales(intermediate, hidden),
        "gating_output": torch.zeros(tokens, experts),
        "topk_weights": torch.softmax(torch.randn(tokens, top_k, generator=generator), -1),
        "topk_ids": ids.to(torch.int32),
        "num_bits": bits,
        "routed_scaling_factor": 2.5,
    } | more
    if kind == "nvfp4":
        given |= {
            f"{name}_global_scale": (torch.rand(experts, generator=generator) / 1000).to(DTYPE) for name in ("w1", "w2")
        }
    return {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def run(module, given):
    """Run Marlin's fused-MoE function on a copy of the input, and return the output.

    The arguments are passed in the order of the operator's schema.
    """
    return getattr(module, marlin.NAME)(**given | {"hidden_states": given["hidden_states"].clone()})


def install_column_slices():
    return patched_by(marlin.plan().install)


class Poison(TorchDispatchMode):
    """PyTorch mode that fills all allocated tensors with NaN.

    The attribute ``largest`` is the size of the largest allocated tensor, in elements.
    """

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        if func.overloadpacket.__name__ in ("empty", "empty_like", "new_empty"):
            self.largest = max(self.largest, made.numel())
            if made.is_floating_point() and made.itemsize > 1:
                made.fill_(math.nan)
        return made


def run_both(module, given):
    """Run Marlin's fused-MoE function twice, first as the engine's own, then in column slices. Return both outputs.

    In the second run, new tensors are filled with NaN, so a read of unwritten memory changes the output.
    """
    stock = run(module, given)
    with install_column_slices(), Poison():
        return stock, run(module, given)


def are_equal(a, b):
    """Return whether two outputs have the same bits. On a GPU the outputs need only be close, because the stock
    engine's output differs from run to run.
    """
    if INTERPRETED:
        return a.shape == b.shape and torch.equal(a.view(torch.int16), b.view(torch.int16))
    return bool((a.float() - b.float()).abs().max() <= 0.02 * a.float().abs().max())


@pytest.fixture(autouse=True)
def lower_thresholds(monkeypatch):
    """Lower the thresholds, so that the tests' small tensors count as large."""
    monkeypatch.setattr(column_slices, "MIN_TENSOR_BYTES", 1)
    monkeypatch.setattr(column_slices, "MIN_BYTES_SAVED_PER_SLICE", 1)
    monkeypatch.setattr(column_slices, "MAX_SLOWDOWN_FRACTION", math.inf)
    monkeypatch.setattr(column_slices, "MARLIN_ALIGNMENT_COLUMNS", 128)


@pytest.fixture(autouse=True)
def replace_slow_kernels(monkeypatch, request):
    """Replace this package's kernels by plain PyTorch if Triton's interpreter runs the tests. The interpreted kernels
    would be slow. The test of the kernels themselves still runs them.
    """
    if INTERPRETED and "kernels" not in request.node.name:

        def sum_then_copy(expert_outputs, output, scale, copies):
            moe_sum.moe_sum_torch(expert_outputs, output, scale)
            for source, start, stop, part in copies:
                part.copy_(source[..., start:stop])

        monkeypatch.setattr(sum_and_copy, "sum_and_copy", sum_then_copy)


@pytest.fixture
def slices_per_call(monkeypatch):
    """List with one entry for each call of Marlin's function: the column slices that the call chose. A slice is a pair
    of its first column and the column after its last."""
    found = []
    choose = marlin.choose_column_slices

    def counted(arguments, max_bytes):
        found.append(choose(arguments, max_bytes))
        return found[-1]

    monkeypatch.setattr(marlin, "choose_column_slices", counted)
    return found


def takes_argument(module, name):
    return name in [argument.name for argument in getattr(torch.ops.sglang, marlin.NAME).default._schema.arguments]


# --- The answers -----------------------------------------------------------------------------------------------------


FOUR = [(0, 128), (128, 256), (256, 384), (384, 512)]
INDICES = ("g_idx1", "g_idx2", "sort_indices1", "sort_indices2")


def random_biases():
    return {name: torch.randn(4, columns).to(DTYPE) for name, columns in (("w1_bias", 256), ("w2_bias", 512))}


@pytest.mark.parametrize(
    ("more", "needs", "slices"),
    [
        pytest.param({}, "", FOUR, id="INT4"),
        pytest.param({"kind": "int8"}, "", FOUR, id="INT8"),
        pytest.param({"kind": "mxfp4"}, "clamp_limit", FOUR, id="MXFP4"),
        pytest.param({"kind": "nvfp4"}, "w2_global_scale", FOUR, id="NVFP4"),
        pytest.param({"tokens": 8}, "", FOUR, id="our own kernels"),
        pytest.param({"routed_scaling_factor": None}, "", FOUR, id="no factor"),
        pytest.param({"hidden": 640, "top_k": 4}, "", [*FOUR, (512, 640)], id="top-k of 4"),
        pytest.param({"top_k": 1}, "", FOUR, id="top-k of 1"),
        pytest.param(
            {"hidden": 896, "intermediate": 64, "alignment": 256},
            "",
            [(0, 256), (256, 512), (512, 768), (768, 896)],
            id="the last slice narrower, and still a whole tile",
        ),
        pytest.param({"inplace": True}, "", FOUR, id="in place, for which the engine's callers never ask"),
        pytest.param({"beside": True}, "", FOUR, id="not in place, beside another stream"),
        pytest.param({"is_k_full": False}, "", FOUR, id="k is not full"),
        pytest.param({"clamp_limit": 0.5}, "clamp_limit", FOUR, id="a clamp"),
        pytest.param({"is_gated": False, "gated": False, "activation": "relu2"}, "is_gated", FOUR, id="no gate"),
        # Values of GPTQ layers without act-order.
        pytest.param(dict.fromkeys(INDICES, torch.empty(4, 0, dtype=torch.int32)), "", FOUR, id="empty indices"),
        pytest.param(random_biases(), "w2_bias", FOUR, id="biases"),
    ],
)
def test_a_server_with_column_slices_answers_as_stock(
    module, slices_per_call, monkeypatch, caplog, more, needs, slices
):
    if needs and not takes_argument(module, needs):
        pytest.skip("not in this release")
    caplog.set_level("INFO", log.logger.name)
    more = dict(more)
    monkeypatch.setattr(streams, "has_concurrent_reader", more.pop("beside", False))
    monkeypatch.setattr(column_slices, "MARLIN_ALIGNMENT_COLUMNS", more.pop("alignment", 128))
    given = layer(**more)
    if more.get("kind") == "mxfp4":
        given["hidden_states"] = given["hidden_states"].bfloat16()
    stock, ours = run_both(module, given)
    assert torch.isfinite(stock).all()
    assert stock.float().abs().max() > 0.01
    assert slices_per_call == [slices]
    assert caplog.text.count(f"is cut into {len(slices)} column slices") == 1
    assert are_equal(stock, ours)
    if needs == "w2_bias":
        assert not are_equal(stock, run(module, layer(**more | {"w2_bias": more["w2_bias"].flip(1)})))


@pytest.mark.parametrize("given_map", [False, True])
def test_experts_of_other_ranks_add_nothing_to_the_sum(module, slices_per_call, given_map):
    """The sum leaves out experts on other ranks. The GEMM does not write the rows of these experts, so the rows still
    have values of the previous slice.
    """
    ids = torch.tensor([[0, -1, 1], [2, 3, -1], [-1, -1, -1], [1, 2, 0]] * 10)
    more = {"expert_map": torch.tensor([0, 1, 2, 3, -1, -1, -1, -1], dtype=torch.int32)}
    if not given_map:
        ids, more = ids.clamp_min(0), {}
    stock, ours = run_both(module, layer(ids=ids, **more))
    assert len(slices_per_call[0]) == 4
    assert are_equal(stock, ours)
    if given_map:
        assert not ours[2::4].any()


def test_no_kernel_reads_the_input_after_the_output_overwrites_it(module):
    """No kernel reads the input after the output has overwritten it. The test sets ``inplace``, which makes the output
    overwrite the input. No caller in the engine sets ``inplace``."""
    given = layer(inplace=True)
    stock, x = run(module, given), given["hidden_states"].clone()
    with install_column_slices():
        ours = getattr(module, marlin.NAME)(**given | {"hidden_states": x})
    assert ours.data_ptr() == x.data_ptr()
    assert are_equal(stock, ours)


# --- Memory ----------------------------------------------------------------------------------------------------------


def test_no_tensor_is_larger_than_the_output(module, slices_per_call):
    given = layer(intermediate=64)
    with install_column_slices(), Poison() as poison:
        run(module, given)
    assert len(slices_per_call[0]) == 4
    assert poison.largest == 40 * 512  # one tensor of this size is the output


def test_the_first_gemms_output_is_freed_before_the_slices_begin(module, monkeypatch):
    alive, sums = [], []
    fill, run_gemm_and_sum = marlin._FirstOutput.allocate, marlin.run_gemm_and_sum

    def filled(self):
        import weakref

        made = fill(self)
        alive.append(weakref.ref(made))
        return made

    def summed(*args, **kwargs):
        sums.append(alive[0]())
        return run_gemm_and_sum(*args, **kwargs)

    monkeypatch.setattr(marlin._FirstOutput, "allocate", filled)
    monkeypatch.setattr(marlin, "run_gemm_and_sum", summed)
    with install_column_slices():
        run(module, layer())
    assert sums == [None]


def test_moe_workspace_mb_bounds_the_workspace(module, slices_per_call, monkeypatch):
    monkeypatch.setattr(column_slices, "MIN_TENSOR_BYTES", 1 << 40)
    monkeypatch.setenv(column_slices.MOE_WORKSPACE_MB.name, "1")
    given = layer(tokens=500, intermediate=64, experts=2, top_k=2)
    stock, ours = run_both(module, given)
    assert len(slices_per_call[0]) > 1
    assert are_equal(stock, ours)
    monkeypatch.setenv(column_slices.MOE_WORKSPACE_MB.name, "100")
    with install_column_slices():
        run(module, given)
    assert len(slices_per_call) == 1  # the tensor is far too small for column slices


# --- The dead input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offered", ["a dead input", "the MoE input", "to a whole call"])
def test_the_output_lies_in_the_dead_input(module, slices_per_call, monkeypatch, offered):
    given = layer()
    stock, x = run(module, given), given["hidden_states"].clone()
    buffer = x.view(-1).view(40, 512) if offered == "the MoE input" else torch.full_like(x, math.nan)
    if offered == "to a whole call":
        monkeypatch.setattr(column_slices, "MIN_TENSOR_BYTES", 1 << 40)
    before = buffer.clone()
    with install_column_slices(), channel.moe_output_buffer_ctx(buffer):
        ours = getattr(module, marlin.NAME)(**given | {"hidden_states": x})
        assert channel.get_offered_buffer() is (buffer if offered == "to a whole call" else None)
    assert [len(slices) for slices in slices_per_call] == ([] if offered == "to a whole call" else [4])
    assert (ours.data_ptr() == buffer.data_ptr()) == (offered == "a dead input")
    assert are_equal(stock, ours)
    assert offered == "a dead input" or torch.equal(buffer.nan_to_num(), before.nan_to_num())


# --- What stays whole ------------------------------------------------------------------------------------------------


def reordered():
    return torch.arange(128, dtype=torch.int32).repeat(4, 1)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        pytest.param(
            {"no_combine": True}, "the caller wants the expert outputs before they are summed", id="no_combine"
        ),
        pytest.param({"w2_zeros": torch.zeros(4, 4, 64, dtype=torch.int32)}, "zero points", id="zero points"),
        pytest.param({"g_idx2": reordered(), "sort_indices2": reordered()}, "act-order", id="act-order"),
        pytest.param({"sort_indices2": reordered()}, "act-order", id="act-order, no groups"),
        pytest.param({"hidden": 576}, "576 columns", id="tiles"),
        pytest.param({"hidden": 256}, None, id="narrow"),
        pytest.param({"beside": True, "inplace": True}, "another stream", id="beside in place"),
    ],
)
def test_small_and_unsupported_calls_do_not_run_in_slices(module, slices_per_call, monkeypatch, caplog, more, reason):
    if "no_combine" in more and not takes_argument(module, "no_combine"):
        pytest.skip("not in this release")
    monkeypatch.setattr(streams, "has_concurrent_reader", more.pop("beside", False))
    whole = []
    original = getattr(module, marlin.NAME)
    with install_column_slices(), caplog.at_level("INFO"):
        wrapper = getattr(module, marlin.NAME)
        by_columns = wrapper.__closure__[wrapper.__code__.co_freevars.index("original")]
        monkeypatch.setattr(by_columns, "cell_contents", lambda *args, **kwargs: whole.append(kwargs))
        for _ in range(2):
            run(module, layer(**more))
    assert [len(found) for found in slices_per_call] == [1, 1]
    assert len(whole) == 2
    assert original is getattr(module, marlin.NAME)
    said = [record.getMessage() for record in caplog.records if "stays uncut" in record.getMessage()]
    assert len(said) == (reason is not None)
    assert reason is None or reason in said[0]


@pytest.mark.parametrize("why", ["small tensors", "dynamo traces"])
def test_the_engines_own_operator_runs(module, slices_per_call, monkeypatch, why):
    if why == "small tensors":
        monkeypatch.setattr(column_slices, "MIN_TENSOR_BYTES", 192 << 20)
    else:
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    stock, ours = run_both(module, layer())
    assert slices_per_call == []
    assert are_equal(stock, ours)


def test_a_call_with_positional_arguments_runs_in_slices(module, slices_per_call):
    given = layer()
    stock = run(module, given)
    first = [given.pop(name) for name in marlin._PARAMETERS]
    with install_column_slices():
        ours = getattr(module, marlin.NAME)(*first, **given)
    assert len(slices_per_call) == 1
    assert are_equal(stock, ours)


# --- Probing ---------------------------------------------------------------------------------------------------------


def test_undo_restores_the_module(module):
    before = dict(vars(module))
    with install_column_slices():
        assert vars(module) != before
    assert vars(module) == before


@pytest.mark.parametrize(
    ("owner", "reason"),
    [(__name__, "not the engine's own operator|wrapped or replaced"), (ELSEWHERE, "not the engine's own operator")],
    ids=["another plugin", "another module of the engine"],
)
def test_a_function_of_another_plugin_is_left_alone(module, monkeypatch, owner, reason):
    code = (lambda *args, **kwargs: None).__code__
    monkeypatch.setattr(module, marlin.NAME, FunctionType(code, vars(importlib.import_module(owner))))
    with pytest.raises(engine.Unsupported, match=reason):
        marlin.plan()


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            ".view(-1, topk, K)",
            ".view(-1, topk, K); print(intermediate_cache3)",
            "uses intermediate_cache3 in an unexpected way",
        ),
        ("intermediate_cache3.view(-1, K)", "intermediate_cache3.t()", "uses intermediate_cache3 in an unexpected way"),
        ("    scalar_type1 =", "    torch = None\n    scalar_type1 =", "uses torch for something else"),
        (
            "intermediate_cache2 = torch.empty",
            "intermediate_cache2 = torch.empty((M,), device=hidden_states.device)\n    "
            "intermediate_cache2 = torch.empty",
            "allocates",
        ),
    ],
    ids=["read", "another view", "torch", "another tensor"],
)
def test_a_function_with_other_uses_is_unsupported(module, monkeypatch, tmp_path, old, new, reason):
    source = engine.read_source(marlin.find_function(module))
    assert old in source
    path = tmp_path / "changed.py"
    path.write_text(source.split("\n", 1)[1].replace(old, new))
    names: dict[str, object] = {}
    annotations = __future__.annotations.compiler_flag
    exec(compile(path.read_text(), str(path), "exec", annotations), vars(module), names)
    monkeypatch.setattr(marlin, "find_function", lambda module: names[marlin.NAME])
    with pytest.raises(engine.Unsupported, match=reason):
        marlin.plan()


# --- The sum and the copy --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("tokens", "columns_", "start", "stop"), [(5, 512, 128, 384), (3, 4096, 0, 2304), (0, 320, 256, 320)]
)
def test_our_kernels_write_only_the_slice_that_they_sum_or_copy(dtype, tokens, columns_, start, stop):
    width = stop - start
    experts_output = torch.randn(tokens, 3, width, device=DEVICE).to(DTYPE)
    both = [torch.full((tokens + 2, columns_), math.nan, device=DEVICE).to(DTYPE) for _ in range(2)]
    copied, memories = [], []
    for kind, rows, of_column in ((torch.int32, 15, 2), (dtype, 6, 1)):
        source = torch.randint(0, 100, (3, rows // 3, columns_ * of_column), device=DEVICE).to(kind)
        size = rows * width * of_column
        memories.append(torch.full((size + 64,), 7, device=DEVICE).to(kind))
        target = memories[-1][32 : 32 + size].view(3, rows // 3, width * of_column)
        copied.append((source, start * of_column, stop * of_column, target))
    outputs = [memory[1 : 1 + tokens, start:stop] for memory in both]
    sum_and_copy.sum_and_copy(experts_output, outputs[0], 2.5, copied)
    sum_and_copy.sum_and_copy(experts_output, outputs[1], 2.5, ())
    moe_sum.moe_sum_torch(experts_output, expected := torch.empty_like(outputs[0]), 2.5)
    for memory, output in zip(both, outputs, strict=True):
        assert torch.equal(output, expected)
        output.fill_(math.nan)
        assert memory.isnan().all()
    for (source, first, last, target), memory in zip(copied, memories, strict=True):
        assert torch.equal(target.float(), source[..., first:last].float())
        assert (memory[:32].float() == 7).all()
        assert (memory[32 + target.numel() :].float() == 7).all()


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_a_captured_call_equals_the_eager_call(module, slices_per_call):
    given = layer(tokens=400, intermediate=64)
    with install_column_slices():
        eager = run(module, given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(module, given)
        captured.fill_(math.nan)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    assert all(len(found) == 4 for found in slices_per_call)
    assert are_equal(eager, captured)
