"""Tests of the change moe-workspace, which computes the experts' outputs in column slices. The tests check how wide
slices are, when a tensor is not cut, and the results of the engine's code in Triton's interpreter.
"""

from __future__ import annotations

import math
import os
import re
from importlib import metadata
from types import SimpleNamespace

import interpreted
import pytest
import torch
from common import moe_tables, output
from hypothesis import given
from hypothesis import strategies as st
from releases import DEFAULT
from sglang_moe_patches.changes import moe_workspace
from sglang_moe_patches.changes.moe_workspace import column_slices, deferred_tensor, marlin, triton
from sglang_moe_patches.changes.moe_workspace.column_slices import (
    LayerShape,
    MarlinGemm,
    TritonGemm,
    choose_packed_slice_width,
    choose_slice_width,
    split_columns,
)
from sglang_moe_patches.core import log
from sglang_moe_patches.core.engine import Unsupported
from sglang_moe_patches.core.patch import Plan, check_environment, plan_for, probe

MB = column_slices.MOE_WORKSPACE_MB.name
fractions = st.sampled_from([0.0, 0.125, 1.0])
max_bytes = st.integers(1, 4 << 30)
layers = st.builds(
    LayerShape,
    tokens=st.integers(1, 1 << 17),
    top_k=st.integers(3, 16),
    hidden=st.integers(16, 1024).map(lambda n: 16 * n),
    intermediate=st.integers(4, 1024).map(lambda n: 16 * n),
    itemsize=st.sampled_from([2, 4]),
    gate_columns=st.just(0),
    weight_bytes=st.integers(0, 1 << 34),
    local_row_fraction=fractions,
)
gemms = st.builds(
    TritonGemm,
    tiles=st.fixed_dictionaries(
        {
            "BLOCK_SIZE_M": st.sampled_from([16, 64, 128]),
            "BLOCK_SIZE_N": st.sampled_from([16, 32, 64, 128, 256]),
            "GROUP_SIZE_M": st.sampled_from([1, 32]),
        }
    ),
    quantized=st.booleans(),
    activation_in_dead_input=st.booleans(),
    uses_staging=st.booleans(),
    columns_per_scale=st.sampled_from([1, 32, 64, 128]),
    scale_stride_bytes=st.integers(1, 64).map(lambda n: 4 * n),
)
packed_layers = st.builds(
    LayerShape,
    tokens=st.integers(1, 1 << 17),
    top_k=st.integers(1, 16),
    hidden=st.integers(1, 128).map(lambda n: 128 * n),
    intermediate=st.integers(1, 64).map(lambda n: 64 * n),
    itemsize=st.just(2),
    gate_columns=st.integers(1, 128).map(lambda n: 64 * n),
    weight_bytes=st.integers(0, 1 << 34),
    local_row_fraction=fractions,
)
packed_gemms = st.builds(MarlinGemm, st.integers(1, 1 << 20), st.booleans())


# --- Width of slices: each limit of column_slices, computed here independently ---------------------------------------


def tensor_bytes(layer):
    """Return the bytes of the tensor with the experts' outputs, [tokens, top-k, hidden]."""
    return layer.tokens * layer.top_k * layer.hidden * layer.itemsize


def triton_bytes(layer, gemm, width):
    """Return two numbers of bytes that the Triton runner has allocated in a layer: when the activation runs, and during
    the second GEMM of a slice with ``width`` columns."""
    rows, inner, size, whole = layer.tokens * layer.top_k, layer.intermediate, layer.itemsize, width >= layer.hidden
    own = 0 if gemm.activation_in_dead_input else inner * size
    quantized = inner + 4 * inner / 128 if gemm.quantized else 0  # a float32 scale for each 128 values
    beside = own + quantized if whole else quantized or own
    staging = layer.tokens * layer.hidden * size if gemm.uses_staging and not whole else 0
    return rows * (2 * inner * size + own), rows * (beside + min(width, layer.hidden) * size) + staging


def triton_us(layer, gemm, slices):
    """Return two times of a layer on the Triton runner, in microseconds: the extra time that it takes in ``slices``
    slices, and its time without slices.

    The constants were fitted to measurements.
    """
    rows, tiles, size = layer.tokens * layer.top_k, gemm.tiles, 1 if gemm.quantized else 2
    small = size == 2 and tiles["BLOCK_SIZE_M"] * tiles["BLOCK_SIZE_N"] <= column_slices.SMALL_TILE_ELEMENTS
    rate = column_slices.SMALL_TILE_OPERATIONS_PER_US if small else column_slices.OPERATIONS_PER_US[size]
    constant, for_each_row = column_slices.SLICE_US[size]
    staged = 2 * layer.tokens * layer.hidden * layer.itemsize if gemm.uses_staging else 0
    operations = 2 * rows * layer.local_row_fraction * layer.hidden * 3 * layer.intermediate
    moved = layer.weight_bytes + 2 * tensor_bytes(layer)
    cost = column_slices.SLICING_US + staged / column_slices.BYTES_PER_US
    return cost + (slices - 1) * (
        constant + rows * for_each_row
    ), operations / rate + moved / column_slices.BYTES_PER_US


def marlin_bytes(layer, gemm, width):
    """Return two numbers of bytes that Marlin has allocated in a layer: when the activation runs, and during the
    second GEMM of a slice with ``width`` columns."""
    rows, inner, hidden = layer.tokens * layer.top_k, layer.intermediate, layer.hidden
    final = 0 if gemm.output_in_dead_input and width < hidden else 2 * layer.tokens * hidden
    own_weights = gemm.column_bytes if width < hidden else 0
    gate_columns = layer.gate_columns or 2 * inner
    return 2 * rows * (inner + gate_columns), 2 * rows * inner + final + width * (2 * rows + own_weights)


def marlin_us(layer, gemm, slices):
    """Return two times of a layer on Marlin, in microseconds: the extra time that it takes in ``slices`` slices, and
    its time without slices.

    The constants were fitted to measurements.
    """
    rows, hidden = layer.tokens * layer.top_k, layer.hidden
    constant, for_each_row = column_slices.MARLIN_SLICE_US
    cost = column_slices.MARLIN_SLICING_US + 2 * hidden * gemm.column_bytes / column_slices.MARLIN_COPIED_BYTES_PER_US
    operations = 2 * rows * layer.local_row_fraction * hidden * (layer.intermediate + layer.gate_columns)
    moved = layer.weight_bytes + 2 * tensor_bytes(layer)
    return (
        cost + (slices - 1) * (constant + rows * for_each_row),
        operations / column_slices.MARLIN_OPERATIONS_PER_US + moved / column_slices.BYTES_PER_US,
    )


def triton_step(gemm):
    """Return the step of the Triton runner's slice widths, in columns: every width is a multiple of this step."""
    scales = 16 // math.gcd(16, gemm.scale_stride_bytes) * gemm.columns_per_scale
    return math.lcm(column_slices.SLICE_ALIGNMENT_COLUMNS, gemm.tiles["BLOCK_SIZE_N"], scales)


@given(layers, gemms, st.none() | max_bytes)
def test_slices_start_at_tiles_scale_blocks_and_16_byte_boundaries(layer, gemm, limit):
    width = choose_slice_width(layer, gemm, limit)
    assert 0 < width <= layer.hidden
    if width < layer.hidden:
        assert width % gemm.tiles["BLOCK_SIZE_N"] == 0
        assert width % gemm.columns_per_scale == 0
        assert width * layer.itemsize % 16 == 0
        assert width // gemm.columns_per_scale * gemm.scale_stride_bytes % 16 == 0


@given(packed_layers, packed_gemms, st.none() | max_bytes)
def test_marlin_slices_are_whole_launches(layer, gemm, limit):
    width = choose_packed_slice_width(layer, gemm, limit)
    slices = split_columns(layer.hidden, width)
    assert slices[-1][1] == layer.hidden
    assert all((stop - start) % column_slices.MARLIN_TILE_COLUMNS == 0 for start, stop in slices)
    assert len(slices) == 1 or width % column_slices.MARLIN_ALIGNMENT_COLUMNS == 0


def check_default_rule(layer, gemm, width, predict_us):
    """Check that a tensor is cut by default only under three conditions: the tensor is large enough, each slice saves
    enough bytes, and the slices take at most 2 % of the layer's time."""
    slices = len(split_columns(layer.hidden, width))
    if slices > 1:
        assert tensor_bytes(layer) >= column_slices.MIN_TENSOR_BYTES
        assert tensor_bytes(layer) / slices**2 >= column_slices.MIN_BYTES_SAVED_PER_SLICE
        cost_us, layer_us = predict_us(layer, gemm, slices)
        assert cost_us <= 0.02 * layer_us


@given(layers, gemms)
def test_default_slices_keep_the_size_saving_and_time_limits(layer, gemm):
    check_default_rule(layer, gemm, choose_slice_width(layer, gemm), triton_us)


@given(packed_layers, packed_gemms)
def test_default_marlin_slices_keep_the_limits_with_the_time_of_their_copies(layer, gemm):
    width = choose_packed_slice_width(layer, gemm)
    check_default_rule(layer, gemm, width, marlin_us)
    assert width == layer.hidden or layer.gate_columns < layer.hidden


def check_memory_limit(layer, gemm, width, step, limit, predict_bytes):
    """Check that slices of ``width`` columns keep the runner's memory within ``limit`` bytes, and that fewer slices
    would need more memory than the limit.

    - Slices do not reduce the memory that is allocated when the activation runs. If this memory has more bytes than
      ``limit``, its number of bytes is the limit instead.
    - If even the narrowest slices need more than the limit, ``width`` must be the narrowest width.
    """
    around, during = predict_bytes(layer, gemm, width)
    limit = max(around, limit)
    assert during <= limit or width == min(step, layer.hidden)
    slices = len(split_columns(layer.hidden, width))
    if slices > 1:
        assert predict_bytes(layer, gemm, layer.hidden)[1] > limit
    if slices > 2:
        wider = -(-layer.hidden // ((slices - 1) * step)) * step
        assert predict_bytes(layer, gemm, wider)[1] > limit


@given(layers, gemms, max_bytes)
def test_a_memory_limit_is_kept_with_the_fewest_slices(layer, gemm, limit):
    check_memory_limit(layer, gemm, choose_slice_width(layer, gemm, limit), triton_step(gemm), limit, triton_bytes)


@given(packed_layers, packed_gemms, max_bytes)
def test_a_memory_limit_of_marlin_is_kept_with_the_fewest_slices(layer, gemm, limit):
    width = choose_packed_slice_width(layer, gemm, limit)
    if layer.gate_columns >= layer.hidden:
        assert width == layer.hidden
    else:
        check_memory_limit(layer, gemm, width, column_slices.MARLIN_ALIGNMENT_COLUMNS, limit, marlin_bytes)


@given(packed_layers, packed_gemms, max_bytes)
def test_marlin_tensors_below_the_least_size_would_not_be_cut(layer, gemm, limit):
    layer = layer._replace(intermediate=min(layer.intermediate, layer.gate_columns))
    if tensor_bytes(layer) < column_slices.compute_min_packed_tensor_bytes(limit):
        assert choose_packed_slice_width(layer, gemm, limit) == layer.hidden


@pytest.mark.parametrize(("rows", "group", "cut"), [(128, 1, False), (64, 1, True), (128, 32, True)])
def test_fp8_tiles_that_go_through_the_columns_first_are_not_cut(rows, group, cut):
    layer, tiles = LayerShape(16384, 8, 7168, 512), {"BLOCK_SIZE_M": rows, "BLOCK_SIZE_N": 128, "GROUP_SIZE_M": group}
    assert (choose_slice_width(layer, TritonGemm(tiles, quantized=True)) < 7168) == cut
    assert choose_slice_width(layer, TritonGemm(tiles)) < 7168


@pytest.mark.parametrize(
    ("layer", "gemm", "limit", "width"),
    [
        (LayerShape(3071, 8, 4096, 384), TritonGemm(), None, 4096),  # a tensor just smaller than 192 MiB is not cut
        (LayerShape(3072, 8, 4096, 384), TritonGemm(), None, 2048),
        # Without the scales of the quantized input, 1,280 columns would fit.
        (LayerShape(16384, 8, 2560, 512), TritonGemm(quantized=True), 1, 1024),
        (LayerShape(16384, 8, 7168, 384), TritonGemm(), 1, 768),
        (LayerShape(16384, 8, 7168, 384), TritonGemm({"BLOCK_SIZE_N": 512}), 1, 512),
    ],
)
def test_size_scales_and_tiles_decide_the_width_at_the_edges_of_the_rule(layer, gemm, limit, width):
    assert choose_slice_width(layer, gemm, limit) == width


@given(layers, gemms, st.booleans(), packed_layers, packed_gemms)
def test_a_limit_cuts_no_tensor_below_the_least_size(layer, gemm, gated, packed, packed_gemm):
    """A memory limit never cuts expert outputs that are smaller than ``compute_min_tensor_bytes(limit)`` (Triton) or
    ``compute_min_packed_tensor_bytes(limit)`` (Marlin). The limit here is one byte less than the runner needs without
    slices.
    """
    layer = layer if gated else layer._replace(gate_columns=layer.intermediate)
    inner_bytes = layer.itemsize * (not gemm.activation_in_dead_input) + gemm.quantized
    limit = tensor_bytes(layer) + layer.tokens * layer.top_k * layer.intermediate * inner_bytes - 1
    if choose_slice_width(layer, gemm, limit) < layer.hidden:
        assert tensor_bytes(layer) >= column_slices.compute_min_tensor_bytes(limit)
    packed = packed._replace(gate_columns=max(packed.gate_columns, packed.intermediate))
    limit = marlin_bytes(packed, packed_gemm, packed.hidden)[1] - 1
    if choose_packed_slice_width(packed, packed_gemm, limit) < packed.hidden:
        assert tensor_bytes(packed) >= column_slices.compute_min_packed_tensor_bytes(limit)


def check_advice(layer, gemm, choose_width, predict_bytes, predict_us, *, slow_order):
    """Check the advice to set ``SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB``, if there is any. With the advised limit, the
    expert outputs must be cut, and the runner's memory must stay within the limit. The saved bytes and the time in the
    advice must be right."""
    if advice := column_slices.advise(layer, gemm, choose_width):
        match = re.search(rf"{MB}=(\d+) .*: ([\d,]+) MB less, about ([\d.]+) ", advice)
        assert match, advice
        limit_mb, saved, times = (float(number.replace(",", "")) for number in match.groups())
        width = choose_width(layer, gemm, int(limit_mb) * 10**6)
        peak_bytes, uncut_bytes = (max(predict_bytes(layer, gemm, columns)) for columns in (width, layer.hidden))
        assert width < layer.hidden
        assert peak_bytes <= limit_mb * 1e6
        scales = layer.tokens * layer.top_k * layer.intermediate / 32
        assert saved * 1e6 == pytest.approx(uncut_bytes - peak_bytes, abs=0.51e6 + scales)
        cost_us, layer_us = predict_us(layer, gemm, len(split_columns(layer.hidden, width)))
        assert times == pytest.approx(1 + max(cost_us / layer_us, 0.07 if slow_order else 0), abs=0.006)


@given(layers, gemms)
def test_the_advised_limit_saves_what_the_advice_says(layer, gemm):
    tiles = gemm.tiles
    slow_order = gemm.quantized and tiles["GROUP_SIZE_M"] == 1 and tiles["BLOCK_SIZE_M"] == 128
    check_advice(layer, gemm, choose_slice_width, triton_bytes, triton_us, slow_order=slow_order)


@given(packed_layers, packed_gemms)
def test_the_advised_limit_for_marlin_saves_what_the_advice_says(layer, gemm):
    check_advice(layer, gemm, choose_packed_slice_width, marlin_bytes, marlin_us, slow_order=False)


#: Tile sizes of Qwen3-30B-A3B's GEMMs, from the engine's tuned configuration for an H200.
TUNED = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "GROUP_SIZE_M": 16}


@pytest.mark.parametrize(
    ("gemm", "choose_width", "expected_message"),
    [
        (TritonGemm(TUNED), choose_slice_width, "302 cuts them all the same: 67 MB less, about 1.04"),
        (TritonGemm(TUNED, quantized=True), choose_slice_width, "302 cuts them all the same: 117 MB less, about 1.03"),
        (
            TritonGemm(TUNED | {"GROUP_SIZE_M": 1}, quantized=True),
            choose_slice_width,
            "302 cuts them all the same: 117 MB less, about 1.07",
        ),
        (
            MarlinGemm(128 * 768 * 9 // 16, output_in_dead_input=True),
            choose_packed_slice_width,
            "302 cuts them all the same: 101 MB less",
        ),
    ],
)
def test_the_advice_names_the_limit_its_saving_and_its_cost(gemm, choose_width, expected_message):
    """For a layer whose expert outputs are not cut by default, the advice names a memory limit with which they are cut.
    It also says how much memory this saves, and how much time it costs. The layer has the sizes of Qwen3-30B-A3B and
    8,192 tokens."""
    layer = LayerShape(8192, 8, 2048, 768, weight_bytes=3 * 128 * 768 * 2048 * 2)
    assert choose_width(layer, gemm) == 2048
    assert column_slices.advise(layer, gemm, choose_width).startswith(f"{MB}={expected_message}")


def test_nothing_is_advised_where_a_cut_saves_nothing():
    """The advice is empty for a layer with Mixtral's sizes. Its intermediate size is larger than its hidden size, so
    the memory peak lies outside the second GEMM, and slices of this GEMM cannot lower the peak."""
    assert column_slices.advise(LayerShape(8192, 8, 4096, 7168), TritonGemm(TUNED), choose_slice_width) == ""


@given(st.integers(1, 20000), st.integers(1, 20000))
def test_slices_cover_every_column_once_in_order(hidden, width):
    slices = split_columns(hidden, width)
    assert [column for start, stop in slices for column in range(start, stop)] == list(range(hidden))
    assert all(stop - start == width for start, stop in slices[:-1])


def test_no_measured_layer_costs_more_than_two_per_cent():
    """No measured layer with column slices takes significantly more than 1.02 times the stock engine's time.

    The ratio of the two times has a 95 % confidence interval. The lower end of this interval must be at most 1.02 for
    each layer.

    The layers were measured with several batch sizes, and with default or tuned tiles.
    """
    cells = moe_tables.find_cells_of_chosen_width(output.load("moe-workspace/h200-slices")["figures"]["cells"])
    cut = {key: one for key, one in cells.items() if one is not None}
    assert len(cut) > 25
    assert all(one["interval"][0] <= 1.02 and one["same"] for one in cut.values())
    # Kimi-K2.5 in BF16 has slow default tiles. 2 % of its time are enough for many slices.
    assert cut["kimi-k2.5", "tp4", "bf16", "default", 16384]["peak"] < 411e6


@pytest.mark.parametrize(
    ("top_k", "hidden", "intermediate", "quantized", "in_dead_input", "peak_mb"),
    [
        (8, 7168, 512, False, False, 411),  # Kimi-K2.5, TP=4
        (8, 7168, 512, True, False, 480),
        (9, 7168, 256, True, False, 420),  # DeepSeek-V3, TP=8; its shared expert counts as a routed one
        (8, 4096, 384, False, False, 380),  # Qwen3-235B, TP=4
        (9, 7168, 512, True, True, 390),  # DeepSeek-V3, TP=4
        (9, 7168, 256, True, True, 345),
        (8, 4096, 384, False, True, 270),
    ],
)
def test_default_slices_keep_the_peak_memory_of_known_models_small(
    top_k, hidden, intermediate, quantized, in_dead_input, peak_mb
):
    layer = LayerShape(16384, top_k, hidden, intermediate)
    scales = {"columns_per_scale": 128, "scale_stride_bytes": intermediate // 128 * 4} if quantized else {}
    gemm = TritonGemm(quantized=quantized, activation_in_dead_input=in_dead_input, **scales)
    assert max(triton_bytes(layer, gemm, choose_slice_width(layer, gemm))) <= peak_mb * 1e6
    if in_dead_input:
        assert top_k * intermediate <= hidden  # the activation's output fits into the dead input


@pytest.mark.parametrize(
    ("experts", "hidden", "intermediate", "group", "asked_mb", "slices"),
    [
        (384, 7168, 256, 32, 700, 7),  # Kimi-K2.5, TP=8: 2,182 MB without slices
        (384, 7168, 512, 32, 800, 7),  # Kimi-K2.5, TP=4: 2,249 MB without slices
        (128, 4096, 384, 128, 420, 8),  # Qwen3-235B, TP=4: 1,309 MB without slices
    ],
)
def test_marlins_slices_keep_int4_models_below_the_asked_memory(experts, hidden, intermediate, group, asked_mb, slices):
    layer = LayerShape(16384, 8, hidden, intermediate, weight_bytes=3 * experts * hidden * intermediate // 2)
    gemm = MarlinGemm(experts * intermediate // 2 + experts * intermediate // group * 2)
    width = choose_packed_slice_width(layer, gemm, asked_mb * 10**6)
    assert len(split_columns(hidden, width)) == slices
    assert max(marlin_bytes(layer, gemm, width)) <= asked_mb * 1e6


# --- Tensors that are not cut ----------------------------------------------------------------------------------------

TOKENS, TOP_K, HIDDEN, INNER = 40, 3, 512, 32


def make_deferred(**operands):
    """Return a tensor for expert outputs that has no memory yet (``DeferredTensor``). It contains the recorded
    arguments of the second GEMM, with 16-bit operands.

    :param operands: fields of the recorded ``SecondGemm`` that differ from a plain 16-bit GEMM.
    """
    deferred = deferred_tensor.DeferredTensor((TOKENS, TOP_K, HIDDEN), torch.device("cpu"), torch.bfloat16)
    tiles = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "GROUP_SIZE_M": 1}
    plain = {
        "activations": torch.ones(TOKENS * TOP_K, INNER, dtype=torch.bfloat16),
        "weights": torch.ones(4, HIDDEN, INNER, dtype=torch.bfloat16),
        **dict.fromkeys(("bias", "activations_scale", "weights_scale", "zero_points")),
        "rest": (*[None] * 7, tiles),
        "kwargs": {"use_fp8_w8a8": False, "use_int8_w8a8": False, "block_shape": None},
    }
    deferred.gemm = deferred_tensor.SecondGemm(**plain | operands)
    return deferred


@pytest.fixture
def run_narrow_slices():
    """Function that computes a deferred tensor (:func:`make_deferred`) with the narrowest slices. It returns two lists:
    the operands of each call of the GEMM, and "slice" or "whole" for each sum over a token's experts."""

    def run(deferred, output):
        gemms, sums = [], []
        call = deferred_tensor.FusedMoeCall(2 * INNER, 0, 1.0, False, False, 1)
        token = deferred_tensor.current_call.set(call)
        try:
            deferred_tensor.run_gemm_and_sum(
                deferred,
                output,
                1.0,
                invoke=lambda *operands, **kwargs: gemms.append(operands),
                invoke_quantized=pytest.fail,
                whole_sum=lambda *args: sums.append("whole"),
                slice_sum=lambda *args: sums.append("slice"),
            )
        finally:
            deferred_tensor.current_call.reset(token)
        return gemms, sums

    return run


@pytest.mark.parametrize(("in_dead_input", "slices"), [(True, 1), (False, 2)])
def test_the_activation_counts_as_in_the_dead_input_only_if_it_lies_there(in_dead_input, slices):
    """The expert outputs are cut into slices only if the activation's output takes memory of its own.

    The memory limit is the size of the uncut expert outputs. If the activation's output lies in the dead input, it
    needs no further memory, and the expert outputs stay in one piece. Otherwise both together exceed the limit, and the
    expert outputs must be cut.
    """
    deferred, rows = make_deferred(), TOKENS * TOP_K
    activations = deferred.gemm.activations
    call = deferred_tensor.FusedMoeCall(2 * INNER, 0, 1.0, False, False, rows * HIDDEN * 2)
    call.dead_input_address = (activations if in_dead_input else torch.empty_like(activations)).data_ptr()
    token = deferred_tensor.current_call.set(call)
    try:
        assert len(deferred_tensor.choose_column_slices(deferred, plain_output())) == slices
    finally:
        deferred_tensor.current_call.reset(token)


def plain_output():
    """Return an output tensor like the tensor that the engine allocates."""
    return torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)


BLOCKS = {"weights_scale": torch.ones(4, 3), "kwargs": {"block_shape": [128, 128]}}


@pytest.mark.parametrize(
    ("operands", "output"),
    [
        pytest.param({"weights": torch.ones(4, HIDDEN + 64, INNER)}, plain_output(), id="padded"),
        pytest.param({"weights": torch.ones(4, HIDDEN)}, plain_output(), id="flat"),
        pytest.param({"bias": torch.ones(4, 1)}, plain_output(), id="bias"),
        pytest.param({"weights_scale": torch.ones(4, 3)}, plain_output(), id="scales"),
        pytest.param(BLOCKS, plain_output(), id="blocks"),
        pytest.param({"zero_points": torch.ones(4, HIDDEN // 2)}, plain_output(), id="zero points"),
        pytest.param({}, torch.empty(HIDDEN, TOKENS, dtype=torch.bfloat16).T, id="columns apart"),
        pytest.param({}, plain_output().float(), id="dtype"),
        pytest.param({}, plain_output()[:-1], id="rows"),
    ],
)
def test_an_uncut_tensor_is_computed_from_the_original_operands(run_narrow_slices, operands, output):
    """If an operand or the layer's output has an unexpected shape or dtype, the expert outputs are not cut. The GEMM
    then receives the original operands."""
    operands = operands | {"kwargs": make_deferred().gemm.kwargs | operands.get("kwargs", {})}
    deferred = make_deferred(**operands)
    captured = deferred.gemm
    ((activations, weights, bias, whole, _, scale, zero_points, *rest),), sums = run_narrow_slices(deferred, output)
    assert weights is captured.weights
    assert bias is captured.bias
    assert scale is captured.weights_scale
    assert zero_points is captured.zero_points
    assert activations is captured.activations
    assert tuple(rest) == captured.rest
    assert whole.shape == (TOKENS, TOP_K, HIDDEN)
    assert sums == ["whole"]


@pytest.mark.parametrize("scale", [None, torch.ones(4), torch.ones(4, HIDDEN, 1)], ids=["none", "one", "columns"])
def test_slices_are_computed_on_views_of_the_columns(run_narrow_slices, scale, caplog):
    caplog.set_level("INFO", log.logger.name)
    weights = torch.ones(4, HIDDEN, INNER, dtype=torch.bfloat16)
    gemms, sums = run_narrow_slices(make_deferred(weights=weights, weights_scale=scale), plain_output())
    assert [operands[1].data_ptr() - weights.data_ptr() for operands in gemms] == [0, 256 * INNER * 2]
    assert [operands[1].shape[1] for operands in gemms] == [256, 256]
    assert sums == ["slice", "slice"]
    run_narrow_slices(
        make_deferred(), plain_output()
    )  # the log line appears only once, for the first layer that is cut
    assert [record.getMessage().partition("Triton's ")[2] for record in caplog.records] == [
        "[tokens, top-k, hidden] tensor of 0 MB is cut into 2 column slices"
    ]


# --- Servers and runners that run column slices ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "runner", "reason"),
    [
        ("cuda", "triton", None),
        ("cuda", "auto", None),
        ("cuda", "marlin", None),  # with --moe-runner-backend marlin, BF16 experts run on Triton
        ("cpu", "triton", "--device is cpu"),
    ],
)
def test_only_servers_without_cuda_are_skipped(device, runner, reason):
    skip = moe_workspace.CHANGE.skip(SimpleNamespace(device=device, moe_runner_backend=runner))
    assert (skip and skip.reason) == reason


@pytest.mark.parametrize("value", ["0", "-1", "1e3", "many", "4096.0", "\u0664"])
def test_a_bad_value_is_refused_with_the_name_of_the_variable(value):
    with pytest.raises(ValueError, match=f"^{MB}: expected a positive number of MB"):
        check_environment([moe_workspace.CHANGE], {MB: value})


FOREIGN_KERNEL = "invoke_fused_moe_kernel is wrapped or replaced by theirs.kernel"
AMD = "AMD's sums have not been tried"


@pytest.mark.parametrize(
    ("triton_plan", "marlin_plan", "installed", "reason"),
    [
        (AMD, AMD, None, AMD),
        (Unsupported, Unsupported, None, FOREIGN_KERNEL),
        (Unsupported, "applied", ["marlin"], f"no column slices on the Triton runner: {FOREIGN_KERNEL}"),
        ("applied", "applied", ["triton", "marlin"], ""),
        ("applied", Unsupported, ["triton"], f"no column slices on Marlin: {FOREIGN_KERNEL}"),
        ("applied", AMD, ["triton"], ""),
        (
            "applied",
            ValueError,
            ["triton"],
            f"no column slices on Marlin: probing it failed: ValueError: {FOREIGN_KERNEL}",
        ),
    ],
)
def test_an_unsupported_runner_does_not_affect_the_other_runner(
    monkeypatch, triton_plan, marlin_plan, installed, reason
):
    from sglang_moe_patches.changes.moe_workspace import marlin, streams, triton

    parts = []

    def plan(name, result):
        if result == "applied":
            return Plan.applied(lambda patcher: parts.append(name))
        if isinstance(result, str):
            return Plan.not_needed(result)
        raise result(FOREIGN_KERNEL)

    monkeypatch.setattr(streams, "probe", lambda check_model: lambda patcher: None)
    monkeypatch.setattr(moe_workspace, "_offer_dead_input", lambda: (None, ""))
    for module, name, result in ((triton, "triton", triton_plan), (marlin, "marlin", marlin_plan)):
        monkeypatch.setattr(module, "plan", lambda name=name, result=result: plan(name, result))
    answer = probe(moe_workspace.CHANGE)
    assert answer.reason == reason
    if installed is None:
        assert answer.install is None
    else:
        answer.install(None)
        assert parts == installed


@pytest.mark.parametrize(
    ("variables", "server", "expected"),
    [
        ({}, {}, Plan.not_needed("AMD's sums")),
        ({}, {"device": "cpu"}, Plan.not_needed("--device is cpu")),
        ({MB: "500"}, {}, Plan.unsupported(f"{MB} is set, but column slices cannot run here: AMD's sums")),
        (
            {MB: "500"},
            {"device": "cpu"},
            Plan.unsupported(f"{MB} is set, but column slices cannot run here: --device is cpu"),
        ),
    ],
)
def test_a_memory_limit_without_column_slices_is_unsupported(variables, server, expected, monkeypatch):
    for runner in (triton, marlin):
        monkeypatch.setattr(runner, "plan", lambda: Plan.not_needed("AMD's sums"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    server_args = SimpleNamespace(**{"device": "cuda", **server})
    assert plan_for(moe_workspace.CHANGE, {moe_workspace.CHANGE.name}, server_args) == expected


# --- The kernels, and the engine's function in the interpreter -------------------------------------------------------


def compile_to_ptx(kernel, types: dict[str, str], constants: dict[str, int], capability: int) -> str:
    """Compile a Triton kernel for a GPU of this compute capability, and return the PTX.

    The kernel's pointers and integers are declared to be multiples of 16.
    """
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


@pytest.mark.parametrize(("capability", "dtype"), [(80, "fp16"), (90, "bf16")])
def test_the_kernels_compile_and_move_16_bytes_at_a_time(capability, dtype, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("interpreted kernels are not compiled")
    from sglang_moe_patches.changes.moe_workspace.kernels import moe_sum, sum_and_copy

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sums = {"expert_outputs_ptr": f"*{dtype}", "output_ptr": f"*{dtype}", "scale": "fp32"}
    sums |= dict.fromkeys(("columns", "output_stride"), "i32")
    ptx = compile_to_ptx(moe_sum._moe_sum_kernel, sums, {"TOP_K": 8, "BLOCK": 1024}, capability)
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == 8
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == 1
    copies = {f"{operand}_{end}": "*i64" for operand in ("weights", "scales") for end in ("ptr", "copy_ptr")}
    copies |= {f"{operand}_{size}": "i32" for operand in ("weights", "scales") for size in ("stride", "words")}
    copies |= dict.fromkeys(("weights_programs", "copy_programs"), "i32")
    blocks = {"TOP_K": 8, "BLOCK": 1024, "WEIGHTS_BLOCK": 1024, "SCALES_BLOCK": 256}
    ptx = compile_to_ptx(sum_and_copy._sum_and_copy_kernel, sums | copies, blocks, capability)
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == 8
    assert len(re.findall(r"ld\.global\.v2\.b64", ptx)) == len(re.findall(r"st\.global\.v2\.b64", ptx)) == 5


RELEASE_DEPENDENT_TESTS = "marlin or bits or options_of_the_fused_moe or inside_the_first_gemm or full_size"
"""Argument of ``pytest -k`` that selects the tests whose result depends on the engine release. On releases other than
the default, only these tests run in Triton's interpreter."""


@pytest.mark.long("a hundred tests of kernels in the interpreter, on one import of the engine")
@pytest.mark.parametrize(
    ("marks", "passed"), [("not product", 95), pytest.param("product", 16, marks=pytest.mark.product)]
)
def test_gpu_tests_of_both_runners_pass_in_the_interpreter(marks: str, passed: int) -> None:
    """The tests of Triton's and Marlin's runner in test/gpu must pass on the CPU, too. They run in another process.

    This process uses the engine's code for CUDA. Triton's interpreter runs the kernels of Triton, and a stand-in
    replaces Marlin's kernel.
    """
    pytest.importorskip("triton")
    some = metadata.version("sglang") != DEFAULT and marks == "not product"
    tests = ["test_moe_workspace_cuda.py", "test_moe_workspace_marlin_cuda.py"]
    ran, output = interpreted.run_tests(tests, ["-m", marks, *some * ["-k", RELEASE_DEPENDENT_TESTS]], timeout=1700)
    assert ran >= (59 if some else passed), output  # otherwise some tests were skipped
