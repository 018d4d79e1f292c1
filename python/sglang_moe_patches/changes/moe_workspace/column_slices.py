"""Decide whether the expert outputs [tokens, top-k, hidden] are cut into column slices, and how wide the slices are.

All functions are pure functions of sizes. :func:`choose_slice_width` decides for the Triton runner,
:func:`choose_packed_slice_width` for Marlin. Both return ``hidden`` if the tensor is not cut. The constants for times
are fitted to the results in benchmark/results/moe-workspace, measured on an H200.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from math import ceil, gcd, isqrt, lcm
from typing import NamedTuple

from sglang_moe_patches.core import log
from sglang_moe_patches.core.variables import Variable, make_positive_number_parser

MOE_WORKSPACE_MB: Variable[int | None] = Variable(
    "SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB",
    "memory limit in MB of an MoE layer on Triton or Marlin; unset: slices cost at most 2 % of the layer's time",
    make_positive_number_parser("MB"),
)

# Default limits: the next three constants. If the user sets MOE_WORKSPACE_MB, that value replaces them.
#: Size in bytes of the smallest [tokens, top-k, hidden] tensor that is cut.
MIN_TENSOR_BYTES = 192 << 20
#: Smallest number of bytes that each slice after the first must save.
MIN_BYTES_SAVED_PER_SLICE = 36 << 20
#: Largest fraction of the layer's time that slices may cost.
MAX_SLOWDOWN_FRACTION = 0.02

#: Alignment of slices in columns: the first column of a slice is a multiple of this number.
SLICE_ALIGNMENT_COLUMNS = 256
#: Alignment of operands in bytes. Triton compiles one kernel for operands with this alignment, and another kernel for
#: other operands.
OPERAND_ALIGNMENT_BYTES = 16
MARLIN_ALIGNMENT_COLUMNS = 256
#: Granularity of Marlin in columns: each of its kernel launches computes a multiple of this number of columns.
MARLIN_TILE_COLUMNS = 128

# Costs of slices on an H200, in microseconds. Keys: bytes of an activation (1 for FP8 and INT8, 2 for 16 bits).
#: Fixed cost for each layer that is computed in more than one slice.
SLICING_US = 10.0
#: Cost of each slice after the first: a constant (kernel launch and last wave), and an amount for each row, because the
#: activations are read again.
SLICE_US = {1: (10.0, 3e-4), 2: (30.0, 5e-5)}
#: Operations per microsecond with the engine's tuned tiles, and with the small 16-bit tiles that the engine uses if
#: nobody tuned tiles for the layer.
OPERATIONS_PER_US = {1: 0.7e9, 2: 0.8e9}
SMALL_TILE_ELEMENTS, SMALL_TILE_OPERATIONS_PER_US = 64 * 64, 0.25e9
BYTES_PER_US = 4.0e6
#: Smallest estimated slowdown by slices, as a fraction of the layer's time, for GEMMs with ``has_slow_order``. Measured
#: slowdowns are 3 to 7 %.
SLOW_ORDER_SLOWDOWN = 0.07

# Costs of slices with Marlin on an H200, in microseconds. The tuples have a constant and an amount per row.
MARLIN_SLICING_US = 10.0
MARLIN_SLICE_US = (15.0, 3.0e-4)
MARLIN_OPERATIONS_PER_US = 0.25e9
#: Bytes of the second GEMM's weights and scales that are copied in a microsecond, including the time in which the GEMM
#: reads the copy.
MARLIN_COPIED_BYTES_PER_US = 2.5e6


class LayerShape(NamedTuple):
    """Sizes of one layer's routed experts in a forward pass on this rank.

    :param tokens: rows of the layer's input.
    :param top_k: experts per token.
    :param hidden: columns of the layer's output.
    :param intermediate: the experts' intermediate size on this rank: columns of the activation's output.
    :param itemsize: bytes of an element of the output and of both GEMMs' outputs.
    :param gate_columns: columns of the first GEMM's output. 0 means twice ``intermediate``.
    :param weight_bytes: bytes of both GEMMs' weights and scales.
    :param local_row_fraction: fraction of the rows whose expert is on this rank (below 1 with expert parallelism).
    """

    tokens: int
    top_k: int
    hidden: int
    intermediate: int
    itemsize: int = 2
    gate_columns: int = 0
    weight_bytes: int = 0
    local_row_fraction: float = 1.0

    @property
    def rows(self) -> int:
        """Rows of both GEMMs' outputs: one row for each token and each of the token's ``top_k`` experts."""
        return self.tokens * self.top_k

    @property
    def first_gemm_columns(self) -> int:
        """Columns of the first GEMM's output."""
        return self.gate_columns or 2 * self.intermediate

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the expert outputs, [tokens, top-k, hidden]."""
        return self.rows * self.hidden * self.itemsize

    @property
    def output_bytes(self) -> int:
        """Bytes of the layer's output, [tokens, hidden]."""
        return self.tokens * self.hidden * self.itemsize

    def estimate_layer_us(self, operations_per_us: float) -> float:
        """Return the estimated time of both GEMMs and the sum, in microseconds.

        :param operations_per_us: floating-point operations that the GEMMs compute in a microsecond.
        """
        columns = self.intermediate + self.first_gemm_columns
        operations = 2 * self.rows * self.local_row_fraction * self.hidden * columns
        return operations / operations_per_us + (self.weight_bytes + 2 * self.tensor_bytes) / BYTES_PER_US


class RunnerMemory(NamedTuple):
    """Memory that a runner allocates in one forward pass of a layer, in bytes.

    :param at_activation: memory that is allocated while the activation runs. Column slices do not change it.
    :param uncut: memory that is allocated during the second GEMM if the expert outputs are not cut into slices.
    :param beside_slice: memory that is allocated while a slice is computed, in addition to the slice itself.
    :param slice_column: memory of one column of a slice.
    """

    at_activation: int
    uncut: int
    beside_slice: int
    slice_column: int

    def peak_bytes(self, width: int) -> int:
        """Return the runner's peak memory in bytes with slices of ``width`` columns."""
        return max(self.at_activation, self.beside_slice + width * self.slice_column)


class TritonGemm(NamedTuple):
    """Properties of the Triton runner's second GEMM that decide how wide the column slices are.

    :param tiles: the engine's tile configuration. Each slice begins at the edge of a tile. If ``tiles`` is ``None``,
        the time that slices cost is ignored.
    :param quantized: whether the activations are quantized to one byte per element (FP8 or INT8).
    :param activation_in_dead_input: whether the activation's output lies in the dead input, which is allocated anyway.
    :param uses_staging: whether slices are written to a staging buffer, which is copied into the output after the last
        GEMM.
    :param columns_per_scale: columns of the weights that share a scale (block quantization), or 1.
    :param scale_stride_bytes: distance in memory between the scales of neighbouring columns (or blocks of columns).
    """

    tiles: Mapping[str, int] | None = None
    quantized: bool = False
    activation_in_dead_input: bool = False
    uses_staging: bool = False
    columns_per_scale: int = 1
    scale_stride_bytes: int = OPERAND_ALIGNMENT_BYTES

    @property
    def alignment_columns(self) -> int:
        """Alignment of slices in columns: the start of each slice is a multiple of this number."""
        scales = OPERAND_ALIGNMENT_BYTES // gcd(OPERAND_ALIGNMENT_BYTES, self.scale_stride_bytes)
        tile = self.tiles["BLOCK_SIZE_N"] if self.tiles else 1
        return lcm(SLICE_ALIGNMENT_COLUMNS, tile, self.columns_per_scale * scales)

    @property
    def input_itemsize(self) -> int:
        """Bytes of one element of the second GEMM's input."""
        return 1 if self.quantized else 2

    @property
    def has_slow_order(self) -> bool:
        """Whether the GEMM computes its tiles in an order that makes slices slow.

        With ``GROUP_SIZE_M`` 1, the GEMM computes all tiles of a row of tiles before the next row of tiles. If the
        activations are also quantized, and tiles have at least 128 rows, even two slices slowed the layer down by 3 to
        7 % in measurements (:data:`SLOW_ORDER_SLOWDOWN`). The result is true if all three conditions hold.
        """
        assert self.tiles is not None
        return self.quantized and self.tiles.get("GROUP_SIZE_M") == 1 and self.tiles["BLOCK_SIZE_M"] >= 128

    @property
    def operations_per_us(self) -> float:
        """Floating-point operations that an H200 computes in a microsecond with this GEMM's tiles."""
        assert self.tiles is not None
        is_small = self.tiles["BLOCK_SIZE_M"] * self.tiles["BLOCK_SIZE_N"] <= SMALL_TILE_ELEMENTS
        return (
            SMALL_TILE_OPERATIONS_PER_US if is_small and not self.quantized else OPERATIONS_PER_US[self.input_itemsize]
        )

    def estimate_slicing_us(self, layer: LayerShape, slices: int) -> float:
        """Return the extra time of ``slices`` slices in microseconds, compared with a tensor that is not cut."""
        staging_us = 2 * layer.output_bytes / BYTES_PER_US if self.uses_staging else 0
        return (
            SLICING_US + staging_us + (slices - 1) * _compute_slice_cost_us(SLICE_US[self.input_itemsize], layer.rows)
        )

    def estimate_slowdown(self, layer: LayerShape, slices: int) -> float:
        """Return the extra time of ``slices`` slices as a fraction of the layer's time."""
        slowdown = self.estimate_slicing_us(layer, slices) / layer.estimate_layer_us(self.operations_per_us)
        return max(slowdown, SLOW_ORDER_SLOWDOWN) if self.has_slow_order else slowdown

    def activation_output_bytes(self, layer: LayerShape) -> int:
        """Return the bytes that the runner allocates for the activation's output."""
        return 0 if self.activation_in_dead_input else layer.itemsize * layer.rows * layer.intermediate

    def input_bytes(self, layer: LayerShape) -> int:
        """Return the bytes of the second GEMM's input, without its scales."""
        return layer.rows * layer.intermediate if self.quantized else self.activation_output_bytes(layer)

    def compute_memory(self, layer: LayerShape) -> RunnerMemory:
        """Return how much memory the Triton runner allocates in a layer with these sizes."""
        activation_output_bytes, input_bytes = self.activation_output_bytes(layer), self.input_bytes(layer)
        # The scales of the quantized input have at most four bytes for each group of 128 elements.
        input_with_scales = input_bytes + (input_bytes // 32 if self.quantized else 0)
        return RunnerMemory(
            at_activation=layer.itemsize * layer.rows * layer.first_gemm_columns + activation_output_bytes,
            # Without slices the GEMM quantizes its own input. The 16-bit activations and the quantized ones are then
            # both allocated.
            uncut=layer.tensor_bytes + input_bytes + (activation_output_bytes if self.quantized else 0),
            beside_slice=input_with_scales + (layer.output_bytes if self.uses_staging else 0),
            slice_column=layer.rows * layer.itemsize,
        )


class MarlinGemm(NamedTuple):
    """Properties of Marlin's second GEMM that decide how wide the column slices are.

    :param column_bytes: bytes of one column's weights and scales, summed over all experts.
    :param output_in_dead_input: whether the layer's output lies in the dead input, which is allocated anyway.
    """

    column_bytes: int
    output_in_dead_input: bool = False

    def estimate_slicing_us(self, layer: LayerShape, slices: int) -> float:
        """Return the extra time of ``slices`` slices in microseconds, compared with a tensor that is not cut."""
        copies_us = 2 * layer.hidden * self.column_bytes / MARLIN_COPIED_BYTES_PER_US
        return MARLIN_SLICING_US + copies_us + (slices - 1) * _compute_slice_cost_us(MARLIN_SLICE_US, layer.rows)

    def estimate_slowdown(self, layer: LayerShape, slices: int) -> float:
        """Return the extra time of ``slices`` slices as a fraction of the layer's time."""
        return self.estimate_slicing_us(layer, slices) / layer.estimate_layer_us(MARLIN_OPERATIONS_PER_US)

    def compute_memory(self, layer: LayerShape) -> RunnerMemory:
        """Return how much memory the Marlin runner allocates in a layer with these sizes."""
        activation_output_bytes = layer.rows * layer.intermediate * layer.itemsize
        return RunnerMemory(
            at_activation=layer.rows * layer.first_gemm_columns * layer.itemsize + activation_output_bytes,
            # The engine's own function allocates a tensor for its output.
            uncut=activation_output_bytes + layer.output_bytes + layer.tensor_bytes,
            beside_slice=activation_output_bytes + (0 if self.output_in_dead_input else layer.output_bytes),
            slice_column=layer.rows * layer.itemsize + self.column_bytes,
        )


def choose_slice_width(
    layer: LayerShape, gemm: TritonGemm, max_bytes: int | None = None, *, ignores_time: bool = False
) -> int:
    """Return how many columns of the second GEMM's output the Triton runner computes and sums at a time.

    The result is ``hidden`` if the tensor is not cut. More slices save memory, but cost time. Without ``max_bytes``,
    three limits bound the number of slices:

    - Memory at the activation: slices do not lower the memory that is allocated while the activation runs. Let I be
      ``intermediate``. With 16-bit activations, this memory has room for 3 I columns: 2 I for the first GEMM's output
      and I for the activation's output. The activation's output is the second GEMM's input, so it stays allocated.
      2 I columns remain for a slice. Narrower slices would not lower the peak memory. If the activations are quantized
      to 8 bits, the second GEMM's input has the size of only 0.5 I columns, so 2.5 I columns remain. If the
      activation's output also lies in the dead input, the memory at the activation is only 2 I, so 1.5 I remain.
    - Memory that each further slice saves: the ``n``-th slice saves about 1/n^2 of the tensor. For example, the
      slices of a 1,000 MB tensor have 250 MB each if there are four, and 200 MB if there are five, so the fifth slice
      saves 50 MB. Each slice must save at least :data:`MIN_BYTES_SAVED_PER_SLICE`.
    - Time: all slices together cost at most :data:`MAX_SLOWDOWN_FRACTION` of the layer's time
      (:func:`find_max_affordable_slices`).

    :param max_bytes: the user's limit for the runner's memory in bytes, or ``None``. With a limit, the tensor is cut
        into the fewest slices that keep the runner's memory within the limit, whatever time they cost. If the memory at
        the activation exceeds the limit, that memory becomes the limit.
    :param ignores_time: whether to ignore the time that slices cost.
    """
    if max_bytes is None and layer.tensor_bytes < MIN_TENSOR_BYTES:
        return layer.hidden
    memory = gemm.compute_memory(layer)
    if max_bytes is not None:
        return _find_fewest_slices_width(memory, max_bytes, layer.hidden, gemm.alignment_columns)
    # The activation needs 3 I elements per row: 2 I for the first GEMM's output, and I for its own output. The second
    # GEMM's input has I elements, or I/2 if quantized.
    slices = min(
        -(-layer.tensor_bytes // (memory.at_activation - gemm.input_bytes(layer))),
        isqrt(layer.tensor_bytes // MIN_BYTES_SAVED_PER_SLICE),
    )
    if gemm.tiles is not None and not ignores_time:
        slices = min(slices, find_max_affordable_slices(layer, gemm))
    return _compute_even_width(layer.hidden, slices, gemm.alignment_columns)


def choose_packed_slice_width(
    layer: LayerShape, gemm: MarlinGemm, max_bytes: int | None = None, *, ignores_time: bool = False
) -> int:
    """Return how many columns of the second GEMM's output Marlin computes and sums at a time.

    The limits are those of :func:`choose_slice_width`. While a slice is computed, four things need memory: the
    activation's output, the layer's output, the slice, and a copy of the slice's weights and scales. If the first
    GEMM's output is at least as wide as the layer's output, slices save nothing.

    :param max_bytes: memory limit of the runner in bytes, as for :func:`choose_slice_width`.
    :param ignores_time: whether to ignore the time that slices cost.
    """
    if layer.hidden <= layer.first_gemm_columns:
        return layer.hidden
    if max_bytes is None and layer.tensor_bytes < MIN_TENSOR_BYTES:
        return layer.hidden
    memory = gemm.compute_memory(layer)
    if max_bytes is not None:
        return _find_fewest_slices_width(memory, max_bytes, layer.hidden, MARLIN_ALIGNMENT_COLUMNS)
    slices = min(
        -(-layer.hidden // max(1, (memory.at_activation - memory.beside_slice) // memory.slice_column)),
        isqrt(layer.tensor_bytes // MIN_BYTES_SAVED_PER_SLICE),
    )
    if not ignores_time:
        budget_us = MAX_SLOWDOWN_FRACTION * layer.estimate_layer_us(
            MARLIN_OPERATIONS_PER_US
        ) - gemm.estimate_slicing_us(layer, 1)
        slices = min(slices, _count_affordable_slices(budget_us, MARLIN_SLICE_US, layer.rows))
    return _compute_even_width(layer.hidden, slices, MARLIN_ALIGNMENT_COLUMNS)


def advise(layer: LayerShape, gemm: TritonGemm | MarlinGemm, choose_width: Callable[..., int]) -> str:
    """Return a phrase that advises the user to set ``SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB``, so that the runner cuts
    the expert outputs.

    The phrase contains a value for the variable, the memory saved and the time that the slices cost. To find the value,
    this function chooses slices as if they cost no time. The value is the runner's peak memory with these slices,
    rounded up to a megabyte. If these slices save no memory, the phrase is empty.

    :param choose_width: :func:`choose_slice_width` or :func:`choose_packed_slice_width`.
    """
    memory = gemm.compute_memory(layer)
    width_without_time_limit = choose_width(layer, gemm, ignores_time=True)
    megabytes = ceil(memory.peak_bytes(width_without_time_limit) / 1e6)
    width = choose_width(layer, gemm, megabytes * 10**6)
    saved_bytes = max(memory.at_activation, memory.uncut) - memory.peak_bytes(width)
    if width_without_time_limit == layer.hidden or width == layer.hidden or saved_bytes <= 0:
        return ""
    slowdown = gemm.estimate_slowdown(layer, len(split_columns(layer.hidden, width)))
    return (
        f"{MOE_WORKSPACE_MB.name}={megabytes} cuts them all the same: {saved_bytes / 1e6:,.0f} MB less, "
        f"about {1 + slowdown:.2f} times the layer's time"
    )


def find_max_affordable_slices(layer: LayerShape, gemm: TritonGemm) -> int:
    """Return the largest number of slices that cost at most :data:`MAX_SLOWDOWN_FRACTION` of the layer's time.

    The result is at least 1.
    """
    if gemm.has_slow_order:
        # A test or a benchmark sets MAX_SLOWDOWN_FRACTION to 1 or more to lift the limit.
        return 1 if MAX_SLOWDOWN_FRACTION < 1 else layer.rows
    rate = gemm.operations_per_us  # the tiles themselves are a dictionary, which has no hash
    return _find_max_affordable_slices(layer, gemm.quantized, gemm.uses_staging, rate, MAX_SLOWDOWN_FRACTION)


@functools.lru_cache
def _find_max_affordable_slices(
    layer: LayerShape, quantized: bool, uses_staging: bool, operations_per_us: float, max_slowdown_fraction: float
) -> int:
    """Return the result of :func:`find_max_affordable_slices`, cached for each combination of arguments."""
    gemm = TritonGemm(quantized=quantized, uses_staging=uses_staging)
    budget_us = max_slowdown_fraction * layer.estimate_layer_us(operations_per_us) - gemm.estimate_slicing_us(layer, 1)
    return _count_affordable_slices(budget_us, SLICE_US[gemm.input_itemsize], layer.rows)


def _count_affordable_slices(budget_us: float, slice_us: tuple[float, float], rows: int) -> int:
    """Return the largest number of slices that together cost at most ``budget_us`` microseconds. The first slice costs
    nothing.

    If each further slice costs 40 us, for example, a budget of 100 us allows three slices. The result is
    at most ``1 + rows``, so it is finite even if the budget is infinite.

    :param slice_us: pair ``(constant, per_row)``. Each slice after the first costs ``constant + rows * per_row``
        microseconds.
    :param rows: rows of the layer's expert outputs.
    """
    return max(1, 1 + int(min(budget_us / _compute_slice_cost_us(slice_us, rows), rows)))


def _compute_slice_cost_us(slice_us: tuple[float, float], rows: int) -> float:
    """Return the time in microseconds that each slice after the first costs.

    :param slice_us: pair ``(constant, per_row)``.
    :param rows: rows of the layer's expert outputs.
    """
    constant, per_row = slice_us
    return constant + rows * per_row


def _find_fewest_slices_width(memory: RunnerMemory, max_bytes: int, hidden: int, step: int) -> int:
    """Return the slice width for the smallest number of slices that keeps the runner's memory within ``max_bytes``.

    If even the narrowest slices need more memory, return their width, ``step``.
    """
    limit = max(max_bytes, memory.at_activation)
    if memory.uncut <= limit:
        return hidden
    max_columns = (limit - memory.beside_slice) // memory.slice_column
    return _compute_even_width(hidden, max(2, -(-hidden // max(step, max_columns // step * step))), step)


def _compute_even_width(hidden: int, slices: int, step: int) -> int:
    """Return the width of each slice if ``hidden`` columns are cut into ``slices`` slices.

    The width is rounded up to a multiple of ``step``. For one slice, the result is ``hidden``.
    """
    return hidden if slices < 2 else min(hidden, -(-hidden // (slices * step)) * step)


def read_max_bytes() -> int | None:
    """Return the value of :data:`MOE_WORKSPACE_MB` in bytes, or ``None`` if it is unset."""
    megabytes = MOE_WORKSPACE_MB.read()
    return None if megabytes is None else megabytes * 10**6


def compute_min_tensor_bytes(max_bytes: int | None) -> int:
    """Return the size in bytes below which the Triton runner's expert outputs are never cut.

    Each forward pass first compares the size of its expert outputs with this size, because the comparison is cheap.

    With a limit of 400 MB, for example, the result is a quarter of the limit, 100 MB. The reason: slices only reduce
    the memory of the second GEMM. So they help only if the second GEMM needs more memory than the activation function
    before it. In this case the second GEMM needs less than four times the bytes of the expert outputs. With expert
    outputs of less than 100 MB it needs less than 400 MB, so the layer stays within the limit without slices.

    :param max_bytes: the user's limit for the runner's memory, or ``None``. Without a limit, the result is
        ``MIN_TENSOR_BYTES``.
    """
    # Let T be the bytes of the expert outputs, and A the bytes of the activation's output.
    # - The activation needs at least 2 A. Slices do not change this.
    # - The second GEMM needs at most T + 1.5 A: the expert outputs, its 16-bit input, and the quantized input.
    # - Slices help only if the second GEMM needs more than the activation. Then A < 2 T, so T + 1.5 A < 4 T.
    return MIN_TENSOR_BYTES if max_bytes is None else max_bytes // 4


def compute_min_packed_tensor_bytes(max_bytes: int | None) -> int:
    """Return the size in bytes below which the expert outputs of Marlin, whose weights are packed, are never cut.

    With a limit of 300 MB, for example, the result is a third of the limit, 100 MB. The reason: the second GEMM needs
    three tensors, and slices help only if the expert outputs are the largest of these tensors. In this case, if the
    expert outputs have less than 100 MB, the three tensors have less than 300 MB and fit without slices.

    :param max_bytes: the user's limit for the runner's memory, or ``None``. Without a limit, the result is
        ``MIN_TENSOR_BYTES``.
    """
    # The second GEMM needs three tensors: the expert outputs, the activation's output and the layer's output. If slices
    # help, the expert outputs are the largest of the three.
    return MIN_TENSOR_BYTES if max_bytes is None else max_bytes // 3


def report_slices(runner: str, tensor_bytes: int, slices: int) -> None:
    """Log that a runner cuts its expert outputs into slices. For each runner, only the first call in a process logs a
    line.
    """
    message = log.format_line(
        "moe-workspace", "%s's [tokens, top-k, hidden] tensor of %.0f MB is cut into %d column slices"
    )
    log.log_once(logging.INFO, f"cut {runner}", message, runner, tensor_bytes / 1e6, slices)


def split_columns(columns: int, width: int) -> list[tuple[int, int]]:
    """Return the ``(start, stop)`` of each column slice, in order. Each slice has at most ``width`` columns."""
    return [(start, min(start + width, columns)) for start in range(0, columns, width)]
