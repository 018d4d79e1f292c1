"""moe-workspace: how wide the slices are, and the engine's own sequence in Triton's interpreter."""

from __future__ import annotations

import math
import os
import re
from importlib import metadata
from types import SimpleNamespace
from typing import Any, NamedTuple

import interpreted
import pytest
from common import moe_tables, output
from hypothesis import given
from hypothesis import strategies as st
from releases import DEFAULT
from sglang_moe_patches.changes import moe_workspace
from sglang_moe_patches.changes.moe_workspace import column_slices, token_slices
from sglang_moe_patches.changes.moe_workspace.column_slices import packed_slice_width, ranges, slice_width
from sglang_moe_patches.core.engine import Unsupported
from sglang_moe_patches.core.patch import Plan, check_environment, probe

sizes = st.fixed_dictionaries(
    {
        "tokens": st.integers(1, 1 << 17),
        "top_k": st.integers(3, 16),
        "hidden": st.integers(16, 1024).map(lambda n: 16 * n),
        "intermediate": st.integers(4, 1024).map(lambda n: 16 * n),
        "itemsize": st.sampled_from([2, 4]),
        "activation_itemsize": st.sampled_from([None, 1]),
        "activation_elsewhere": st.booleans(),
        "tiles": st.fixed_dictionaries(
            {
                "BLOCK_SIZE_M": st.sampled_from([16, 64, 128]),
                "BLOCK_SIZE_N": st.sampled_from([16, 32, 64, 128, 256]),
                "GROUP_SIZE_M": st.sampled_from([1, 32]),
            }
        ),
        "share": st.sampled_from([0.0, 0.125, 1.0]),
        "scale_columns": st.sampled_from([1, 32, 64, 128]),
        "scale_bytes": st.integers(1, 64).map(lambda n: 4 * n),
        "copied": st.booleans(),
        "weight_bytes": st.integers(0, 1 << 34),
        "most_bytes": st.none(),
    }
)
asked = sizes.flatmap(lambda given: st.integers(1, 4 << 30).map(lambda most: given | {"most_bytes": most}))


# --- How wide --------------------------------------------------------------------------------------------------------


@given(sizes | asked)
def test_slices_cut_no_tile_and_no_block_of_scales_and_start_at_16_bytes(given):
    width = slice_width(**given)
    assert 0 < width <= given["hidden"]
    if width < given["hidden"]:
        assert width % given["tiles"]["BLOCK_SIZE_N"] == 0
        assert width % given["scale_columns"] == 0
        assert width * given["itemsize"] % 16 == 0
        assert width // given["scale_columns"] * given["scale_bytes"] % 16 == 0


def tensor_bytes(given):
    return given["tokens"] * given["top_k"] * given["hidden"] * given["itemsize"]


@given(sizes)
def test_small_tensors_stay_whole(given):
    if tensor_bytes(given) < column_slices.MIN_TENSOR_BYTES:
        assert slice_width(**given) == given["hidden"]


@given(sizes)
def test_each_slice_saves_what_it_costs(given):
    slices = len(ranges(given["hidden"], slice_width(**given)))
    assert slices == 1 or tensor_bytes(given) / slices**2 >= column_slices.MIN_BYTES_SAVED_PER_SLICE


def microseconds(given):
    """What the slices cost, and what the layer takes, by the fitted constants."""
    rows, inner, tiles = given["tokens"] * given["top_k"], given["intermediate"], given["tiles"]
    bytes_ = given["activation_itemsize"] or 2
    slices = len(ranges(given["hidden"], slice_width(**given)))
    copied = 2 * given["tokens"] * given["hidden"] * given["itemsize"] if given["copied"] else 0
    small = bytes_ == 2 and tiles["BLOCK_SIZE_M"] * tiles["BLOCK_SIZE_N"] <= column_slices.SMALL_TILE
    rate = column_slices.SMALL_TILE_OPERATIONS_PER_US if small else column_slices.OPERATIONS_PER_US[bytes_]
    once, for_each_row = column_slices.SLICE_US[bytes_]
    moved = given["weight_bytes"] + 2 * tensor_bytes(given)
    return (
        column_slices.START_US + (slices - 1) * (once + rows * for_each_row) + copied / column_slices.BYTES_PER_US,
        2 * rows * given["share"] * given["hidden"] * 3 * inner / rate + moved / column_slices.BYTES_PER_US,
        slices,
    )


@given(sizes)
def test_slices_cost_two_per_cent_at_the_most(given):
    cost, layer, slices = microseconds(given)
    assert slices == 1 or cost <= 0.02 * layer


def test_tiles_that_go_through_the_columns_first_stay_whole_in_fp8():
    sizes = (16384, 8, 7168, 512, 2)
    for rows, group, cut in ((128, 1, False), (64, 1, True), (128, 32, True)):
        tiles = {"BLOCK_SIZE_M": rows, "BLOCK_SIZE_N": 128, "GROUP_SIZE_M": group}
        assert (slice_width(*sizes, activation_itemsize=1, tiles=tiles) < 7168) == cut
        assert slice_width(*sizes, tiles=tiles) < 7168


def held(given, width):
    """Bytes that the runner holds around the activation, and while it runs slices of this width."""
    rows, inner, size = given["tokens"] * given["top_k"], given["intermediate"], given["itemsize"]
    own = 0 if given["activation_elsewhere"] else inner * size
    quantized = inner + 4 * inner / 128 if given["activation_itemsize"] else 0  # a scale for each 128
    whole = width >= given["hidden"]
    beside = own + quantized if whole else quantized or own
    copied = given["tokens"] * given["hidden"] * size if given["copied"] and not whole else 0
    return rows * (2 * inner * size + own), rows * (beside + min(width, given["hidden"]) * size) + copied


@given(asked)
def test_what_is_asked_for_is_kept_with_the_fewest_slices_that_keep_it(given):
    width, scale = slice_width(**given), 16 // math.gcd(16, given["scale_bytes"]) * given["scale_columns"]
    step = math.lcm(column_slices.ALIGNMENT, given["tiles"]["BLOCK_SIZE_N"], scale)
    around, during = held(given, width)
    most = max(around, given["most_bytes"])
    assert during <= most or width == min(step, given["hidden"])
    slices = len(ranges(given["hidden"], width))
    if slices > 1:
        assert held(given, given["hidden"])[1] > most
    if slices > 2:
        wider = -(-given["hidden"] // ((slices - 1) * step)) * step
        assert held(given, wider)[1] > most


@given(st.integers(1, 20000), st.integers(1, 20000))
def test_the_ranges_are_every_column_once_in_order(hidden, width):
    found = ranges(hidden, width)
    assert [column for start, stop in found for column in range(start, stop)] == list(range(hidden))
    assert all(stop - start == width for start, stop in found[:-1])


def test_in_no_layer_that_was_measured_does_the_rule_cost_more_than_two_per_cent():
    """The lower end of the paired interval of the time, default and tuned tiles, batch by batch."""
    found = moe_tables.by_width(output.load("moe-workspace/h200-slices")["figures"]["cells"])
    cut = {key: one for key, one in found.items() if one is not None}
    assert len(cut) > 25
    assert all(one["interval"][0] <= 1.02 and one["same"] for one in cut.values())
    # As before, where its tiles leave the room.
    assert cut["kimi-k2.5", "tp4", "bf16", "default", 16384]["peak"] < 411e6


@pytest.mark.parametrize(
    ("sizes", "peak_mb"),
    [
        # tokens, top-k, hidden, intermediate, bytes of an activation: and the runner's peak that was asked for
        ((16384, 8, 7168, 512, 2), 411),  # Kimi-K2.5, TP=4
        ((16384, 8, 7168, 512, 1), 480),
        ((16384, 9, 7168, 256, 1), 420),  # DeepSeek-V3, TP=8, its shared expert one more routed one
        ((16384, 8, 4096, 384, 2), 380),  # Qwen3-235B, TP=4
        # The same with the activation's output in the layer's dead input, which is large enough.
        ((16384, 9, 7168, 512, 1, True), 390),  # DeepSeek-V3, TP=4
        ((16384, 9, 7168, 256, 1, True), 345),
        ((16384, 8, 4096, 384, 2, True), 270),
    ],
    ids=str,
)
def test_the_peaks_of_models(sizes, peak_mb):
    tokens, top_k, hidden, intermediate, activation, *elsewhere = sizes
    scales = {"scale_columns": 128, "scale_bytes": intermediate // 128 * 4} if activation == 1 else {}
    width = slice_width(
        *(tokens, top_k, hidden, intermediate, 2),
        activation_itemsize=activation,
        activation_elsewhere=bool(elsewhere),
        **scales,
    )
    rows = tokens * top_k
    around_the_activation = rows * (2 if elsewhere else 3) * intermediate * 2
    second_input = 0 if elsewhere and activation == 2 else intermediate * activation * 1.03125
    during_the_slices = rows * (second_input + width * 2)
    if elsewhere:
        assert rows * intermediate * 2 <= tokens * hidden * 2  # it fits
    assert max(around_the_activation, during_the_slices) <= peak_mb * 1e6


# --- How wide, where a slice's weights are copied first --------------------------------------------------------------

packed = st.fixed_dictionaries(
    {
        "tokens": st.integers(1, 1 << 17),
        "top_k": st.integers(1, 16),
        "hidden": st.integers(1, 128).map(lambda n: 128 * n),
        "intermediate": st.integers(1, 64).map(lambda n: 64 * n),
        "itemsize": st.just(2),
        "gate_columns": st.integers(1, 128).map(lambda n: 64 * n),
        "column_bytes": st.integers(1, 1 << 20),
        "weight_bytes": st.integers(0, 1 << 34),
        "share": st.sampled_from([0.0, 0.125, 1.0]),
        "output_elsewhere": st.booleans(),
        "most_bytes": st.none(),
    }
)
asked_packed = packed.flatmap(lambda given: st.integers(1, 4 << 30).map(lambda most: given | {"most_bytes": most}))


def marlin_held(given, width):
    """Bytes that Marlin holds around the activation, and while it runs slices of this width."""
    rows, inner, hidden = given["tokens"] * given["top_k"], given["intermediate"], given["hidden"]
    output = 0 if given["output_elsewhere"] else 2 * given["tokens"] * hidden
    own_weights = given["column_bytes"] if width < hidden else 0
    return 2 * rows * (inner + given["gate_columns"]), 2 * rows * inner + output + width * (2 * rows + own_weights)


@given(packed | asked_packed)
def test_marlin_has_a_launch_for_each_slice(given):
    width = packed_slice_width(**given)
    found = ranges(given["hidden"], width)
    assert found[-1][1] == given["hidden"]
    assert all((stop - start) % column_slices.MARLIN_TILE == 0 for start, stop in found)
    assert len(found) == 1 or width % column_slices.MARLIN_ALIGNMENT == 0


@given(packed)
def test_marlins_slices_cost_two_per_cent_at_the_most_copies_included(given):
    slices = len(ranges(given["hidden"], packed_slice_width(**given)))
    rows, hidden, inner = given["tokens"] * given["top_k"], given["hidden"], given["intermediate"]
    tensor = 2 * rows * hidden
    once, for_each_row = column_slices.MARLIN_SLICE_US
    cost = column_slices.MARLIN_START_US + 2 * hidden * given["column_bytes"] / column_slices.MARLIN_COPIED_BYTES_PER_US
    cost += (slices - 1) * (once + rows * for_each_row)
    layer = (
        2 * rows * given["share"] * hidden * (inner + given["gate_columns"]) / column_slices.MARLIN_OPERATIONS_PER_US
    )
    layer += (given["weight_bytes"] + 2 * tensor) / column_slices.BYTES_PER_US
    assert slices == 1 or cost <= 0.02 * layer
    assert slices == 1 or tensor >= column_slices.MIN_TENSOR_BYTES
    assert slices == 1 or tensor / slices**2 >= column_slices.MIN_BYTES_SAVED_PER_SLICE
    assert slices == 1 or given["gate_columns"] < hidden


@given(asked_packed)
def test_what_is_asked_of_marlin_is_kept_with_the_fewest_slices_that_keep_it(given):
    width, step = packed_slice_width(**given), column_slices.MARLIN_ALIGNMENT
    around, during = marlin_held(given, width)
    most = max(around, given["most_bytes"])
    if given["gate_columns"] >= given["hidden"]:
        assert width == given["hidden"]
        return
    assert during <= most or width == min(step, given["hidden"])
    slices = len(ranges(given["hidden"], width))
    if slices > 1:
        assert marlin_held(given, given["hidden"])[1] > most
    if slices > 2:
        wider = -(-given["hidden"] // ((slices - 1) * step)) * step
        assert marlin_held(given, wider)[1] > most


@given(asked_packed)
def test_what_is_too_small_to_look_at_on_marlin_would_stay_whole(given):
    given["intermediate"] = min(given["intermediate"], given["gate_columns"])
    if tensor_bytes(given) < column_slices.smallest_packed_tensor(given["most_bytes"]):
        assert packed_slice_width(**given) == given["hidden"]


@pytest.mark.parametrize(
    ("experts", "hidden", "intermediate", "group", "asked_mb", "slices"),
    [
        (384, 7168, 256, 32, 700, 7),  # Kimi-K2.5, TP=8: 2,182 MB stock
        (384, 7168, 512, 32, 800, 7),  # TP=4: 2,249
        (128, 4096, 384, 128, 420, 8),  # Qwen3-235B, TP=4: 1,309
    ],
)
def test_the_peaks_of_models_in_int4(experts, hidden, intermediate, group, asked_mb, slices):
    given = {
        **{"tokens": 16384, "top_k": 8, "hidden": hidden, "intermediate": intermediate, "itemsize": 2},
        **{"gate_columns": 2 * intermediate, "output_elsewhere": False, "most_bytes": asked_mb * 10**6},
        "column_bytes": experts * intermediate // 2 + experts * intermediate // group * 2,
        "weight_bytes": 3 * experts * hidden * intermediate // 2,
    }
    width = packed_slice_width(**given)
    assert len(ranges(hidden, width)) == slices
    assert max(marlin_held(given, width)) <= asked_mb * 1e6


# --- Who needs it ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "runner", "reason"),
    [
        ("cuda", "triton", None),
        ("cuda", "auto", None),
        ("cuda", "marlin", None),  # which leaves BF16 experts to Triton
        ("cpu", "triton", "--device is cpu"),
    ],
)
def test_servers_that_never_reach_it(device, runner, reason):
    assert moe_workspace.CHANGE.skip_reason(SimpleNamespace(device=device, moe_runner_backend=runner)) == reason


# --- Token slices ----------------------------------------------------------------------------------------------------


class Dispatch(NamedTuple):
    hidden_states: Any
    hidden_states_scale: Any
    topk_output: Any


class TopK(NamedTuple):
    topk_weights: Any
    topk_ids: Any
    router_logits: Any


class Combine(NamedTuple):
    hidden_states: Any


def dispatch(tokens, hidden=4, **more):
    torch = pytest.importorskip("torch")
    routed = TopK(torch.rand(tokens, 2), torch.zeros(tokens, 2, dtype=torch.int32), None)
    return Dispatch(torch.randn(tokens, hidden), None, routed)._replace(**more)


@given(st.integers(1, 40000), st.integers(1, 40000))
def test_every_token_is_in_one_slice_and_no_slice_is_too_large(tokens, most):
    found = token_slices.token_ranges(tokens, most)
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == tokens
    assert all(0 < stop - start <= most for start, stop in found)
    assert len(found) == math.ceil(tokens / most)


@pytest.mark.parametrize("tokens", [100, 128, 129, 257])
@pytest.mark.parametrize("inplace", [True, False])
def test_the_rows_of_all_slices_are_put_together(tokens, inplace):
    given_ = dispatch(tokens)
    before, seen = given_.hidden_states.clone(), []

    def core(part):
        assert len(part.topk_output.topk_weights) == len(part.hidden_states)
        seen.append(len(part.hidden_states))
        result = part.hidden_states * part.topk_output.topk_weights[:, :1]
        return Combine(part.hidden_states.copy_(result) if inplace else result)

    found = token_slices._run(core, given_, 128).hidden_states
    assert max(seen) <= 128
    assert sum(seen) == tokens
    assert (found == before * given_.topk_output.topk_weights[:, :1]).all()
    assert (found is given_.hidden_states) == inplace
    assert inplace or (given_.hidden_states == before).all()


class Fp8MoEMethod:
    block_quant = False


class UnquantizedFusedMoEMethod:
    pass


class SomebodysMoEMethod:
    pass


def test_what_is_not_on_the_list_is_not_cut():
    torch = pytest.importorskip("torch")

    def why(given_):
        return token_slices.unsliceable(given_, Dispatch, TopK)

    assert why(dispatch(5)) is None
    assert why(dispatch(5, hidden_states_scale=torch.ones(128))) == "it gets hidden_states_scale"
    assert why(dispatch(5, topk_output=(1, 2))) == "its routing is a tuple"
    assert why((torch.ones(5, 4), None, None)) == "it gets a tuple"
    longer = dispatch(5).topk_output._replace(router_logits=torch.ones(8, 2))
    assert why(dispatch(5, topk_output=longer)) == "router_logits has 8 rows for 5 tokens"


def test_rows_that_depend_on_each_other_are_not_cut():
    def why(method, **layer):
        return token_slices.dependent_rows(SimpleNamespace(quant_method=method, **layer))

    assert why(UnquantizedFusedMoEMethod()) is None
    assert "whole batch" in why(Fp8MoEMethod())
    assert why(Fp8MoEMethod(), w2_input_scale=1.0) is None
    blocks = Fp8MoEMethod()
    blocks.block_quant = True
    assert why(blocks) is None
    assert "SomebodysMoEMethod" in why(SomebodysMoEMethod())


@pytest.mark.parametrize("value", ["0", "-1", "1e3", "many", "4096.0", "\u0664"])
@pytest.mark.parametrize(("name", "of"), [("MAX_MOE_TOKENS", "tokens"), ("MOE_WORKSPACE_MB", "MB")])
def test_a_bad_number_ends_the_start_up_by_name(name, of, value):
    environ = {f"SGLANG_MOE_PATCHES_{name}": value}
    with pytest.raises(ValueError, match=f"SGLANG_MOE_PATCHES_{name}: expected a positive number of {of}"):
        check_environment([moe_workspace.CHANGE], environ)


def test_token_slices_are_for_every_server(monkeypatch):
    server_args = SimpleNamespace(device="cpu", moe_runner_backend="triton")
    assert moe_workspace.CHANGE.skip_reason(server_args)
    monkeypatch.setenv("SGLANG_MOE_PATCHES_MAX_MOE_TOKENS", "4096")
    assert moe_workspace.CHANGE.skip_reason(server_args) is None


def somebody_elses_gemm():
    raise Unsupported("invoke_fused_moe_kernel is wrapped or replaced by theirs.kernel")


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (lambda: Plan.not_needed("AMD's sums have not been tried"), "AMD's sums have not been tried"),
        (somebody_elses_gemm, "invoke_fused_moe_kernel is wrapped or replaced by theirs.kernel"),
    ],
    ids=["AMD", "a plugin around the GEMM"],
)
def test_where_there_are_token_slices_alone_it_is_said_why(monkeypatch, plan, reason):
    from sglang_moe_patches.changes.moe_workspace import token_slices, triton

    monkeypatch.setattr(triton, "plan", plan)
    assert probe(moe_workspace.CHANGE).install is None
    monkeypatch.setenv("SGLANG_MOE_PATCHES_MAX_MOE_TOKENS", "4096")
    monkeypatch.setattr(token_slices, "plan", lambda most: Plan.applied(lambda patcher: None))
    found = probe(moe_workspace.CHANGE)
    assert found.install is not None
    assert found.reason == f"token slices alone: {reason}"


def test_columns_in_one_runner_do_without_the_other(monkeypatch):
    from sglang_moe_patches.changes.moe_workspace import marlin, streams, triton

    installed = []
    monkeypatch.setattr(streams, "look", lambda: lambda patcher: None)
    monkeypatch.setattr(moe_workspace, "_dead_input", lambda: (None, ""))
    plans = {
        module: Plan.applied(lambda patcher, module=module: installed.append(module)) for module in (triton, marlin)
    }
    monkeypatch.setattr(triton, "plan", somebody_elses_gemm)
    monkeypatch.setattr(marlin, "plan", lambda: plans[marlin])
    found = probe(moe_workspace.CHANGE)
    assert found.reason == (
        "no columns in the Triton runner: invoke_fused_moe_kernel is wrapped or replaced by theirs.kernel"
    )
    found.install(None)
    assert installed == [marlin]
    monkeypatch.setattr(triton, "plan", lambda: plans[triton])
    assert probe(moe_workspace.CHANGE).reason == ""
    monkeypatch.setattr(marlin, "plan", somebody_elses_gemm)
    found = probe(moe_workspace.CHANGE)
    assert found.reason.startswith("no columns in Marlin: ")
    found.install(None)
    assert installed == [marlin, triton]

    def unreadable():
        raise OSError("source code not available")

    monkeypatch.setattr(marlin, "plan", unreadable)
    found = probe(moe_workspace.CHANGE)
    assert found.reason == "no columns in Marlin: probing it failed: OSError: source code not available"
    found.install(None)
    assert installed == [marlin, triton, triton]


# --- The kernel, and the engine's sequence ---------------------------------------------------------------------------


def ptx_of(kernel, types: dict[str, str], constants: dict[str, int], capability: int) -> str:
    """What a kernel becomes for a GPU of that capability, its pointers and integers multiples of 16."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = types | dict.fromkeys(constants, "constexpr")
    names = kernel.arg_names
    aligned = [name for name in names if types[name] == "i32" or types[name].startswith("*")]
    source = ASTSource(
        fn=kernel,
        signature={name: types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    made = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    return str(made.asm["ptx"])


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_kernels_compile_and_move_16_bytes_at_a_time(capability, dtype, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("interpreted kernels are not compiled")
    from sglang_moe_patches.changes.moe_workspace.kernels import moe_sum, sum_and_copy

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sums = {"experts_output_ptr": f"*{dtype}", "output_ptr": f"*{dtype}", "scale": "fp32"}
    sums |= dict.fromkeys(("columns", "output_stride"), "i32")
    ptx = ptx_of(moe_sum._moe_sum_kernel, sums, {"TOP_K": 8, "BLOCK": 1024}, capability)
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == 8
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == 1
    copies = {f"{which}_{end}_ptr": "*i64" for which in ("first", "second") for end in ("source", "target")}
    copies |= {f"{which}_{what}": "i32" for which in ("first", "second") for what in ("stride", "words")}
    copies |= dict.fromkeys(("first_programs", "copy_programs"), "i32")
    blocks = {"TOP_K": 8, "BLOCK": 1024, "FIRST_BLOCK": 1024, "SECOND_BLOCK": 256}
    ptx = ptx_of(sum_and_copy._sum_and_copy_kernel, sums | copies, blocks, capability)
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == 8
    assert len(re.findall(r"ld\.global\.v2\.b64", ptx)) == len(re.findall(r"st\.global\.v2\.b64", ptx)) == 5


BITS = "marlin or bits or whatever_the_sequence or inside_the_first_gemm or full_size"
"""Of the tests in the interpreter, those that a release's own code decides. The default release runs all."""


@pytest.mark.parametrize(
    ("marks", "passed"), [("not product", 96), pytest.param("product", 16, marks=pytest.mark.product)]
)
def test_the_engines_sequence_and_marlins_in_the_interpreter(marks: str, passed: int) -> None:
    """On the CPU a server never runs them: here the engine's CUDA branch is taken, its kernels interpreted, and
    Marlin's has a stand-in. In one process, as it imports the engine."""
    pytest.importorskip("triton")
    some = metadata.version("sglang") != DEFAULT and marks == "not product"
    tests = ["test_moe_workspace_cuda.py", "test_moe_workspace_marlin_cuda.py"]
    # Most of a minute of processor time.
    ran, said = interpreted.passed(tests, ["-m", marks, *some * ["-k", BITS]], timeout=1700)
    assert ran >= (60 if some else passed), said  # not skipped; some are about later releases
