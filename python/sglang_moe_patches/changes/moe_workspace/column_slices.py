"""When a [tokens, top-k, hidden] tensor is cut into column slices, and how wide they are: pure functions of sizes.

:func:`slice_width` decides for the Triton runner, :func:`packed_slice_width` for Marlin. The answer ``hidden`` means
that the tensor is not cut. The constants of time are fitted to benchmark/results/moe-workspace, measured on an H200.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from math import ceil, gcd, isqrt, lcm
from typing import NamedTuple

from sglang_moe_patches.core import log
from sglang_moe_patches.core.variables import Variable, positive_number_parser

MOE_WORKSPACE_MB: Variable[int | None] = Variable(
    "SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB",
    "MB (10^6 bytes) that Triton or Marlin may hold, where columns can; unset: what costs at most an estimated 2 % of "
    "the time",
    positive_number_parser("MB"),
)

# Limits that hold unless MOE_WORKSPACE_MB is set.
#: A smaller [tokens, top-k, hidden] tensor is not cut.
MIN_TENSOR_BYTES = 192 << 20
#: One more slice must save this much.
MIN_BYTES_SAVED_PER_SLICE = 36 << 20
#: Slices may cost this fraction of the layer's time.
MAX_SLOWDOWN_FRACTION = 0.02

# Where a slice may start.
SLICE_ALIGNMENT_COLUMNS = 256
#: Triton compiles one kernel for operands that start at multiples of this, and another one for operands that do not.
OPERAND_ALIGNMENT_BYTES = 16
MARLIN_ALIGNMENT_COLUMNS = 256
#: The number of columns of each of Marlin's launches is a multiple of this.
MARLIN_TILE_COLUMNS = 128

# What slices cost on an H200, in microseconds; keys: bytes of an activation, 1 for FP8 and INT8, 2 for 16 bits.
#: Once, if there is more than one slice.
SLICING_US = 10.0
#: For each slice but the first: a constant (launch and last wave), and for each row (activations read again).
SLICE_US = {1: (10.0, 3e-4), 2: (30.0, 5e-5)}
#: Operations of the engine's tuned tiles; of the small 16-bit tiles that it takes where nobody tuned any.
OPERATIONS_PER_US = {1: 0.7e9, 2: 0.8e9}
SMALL_TILE_ELEMENTS, SMALL_TILE_OPERATIONS_PER_US = 64 * 64, 0.25e9
BYTES_PER_US = 4.0e6
#: At least what FP8 tiles of 128 rows lose in slices that go through the columns before the rows (3 to 7 %).
SLOW_ORDER_SLOWDOWN = 0.07

# The same for Marlin.
MARLIN_SLICING_US = 10.0
MARLIN_SLICE_US = (15.0, 3.0e-4)
MARLIN_OPERATIONS_PER_US = 0.25e9
#: Bytes of the second GEMM's weights and scales, which are read, written and read again.
MARLIN_COPIED_BYTES_PER_US = 2.5e6


class LayerShape(NamedTuple):
    """A forward of one layer's routed experts on this rank.

    :param tokens: rows of the layer's input.
    :param top_k: experts of a token.
    :param hidden: columns of the output.
    :param intermediate: the experts' intermediate size on this rank: columns of the activation's output.
    :param itemsize: bytes of an element of the output and of both GEMMs' outputs.
    :param gate_columns: columns of the first GEMM's output; 0: twice ``intermediate``.
    :param weight_bytes: bytes of both GEMMs' weights, with the scales that are read with them.
    :param local_row_fraction: rows with an expert on this rank (expert parallelism), of all rows.
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
        return self.tokens * self.top_k

    @property
    def first_gemm_columns(self) -> int:
        return self.gate_columns or 2 * self.intermediate

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the expert outputs, [tokens, top-k, hidden]."""
        return self.rows * self.hidden * self.itemsize

    @property
    def output_bytes(self) -> int:
        return self.tokens * self.hidden * self.itemsize

    def layer_us(self, operations_per_us: float) -> float:
        """Microseconds of both GEMMs and of the sum."""
        columns = self.intermediate + self.first_gemm_columns
        operations = 2 * self.rows * self.local_row_fraction * self.hidden * columns
        return operations / operations_per_us + (self.weight_bytes + 2 * self.tensor_bytes) / BYTES_PER_US


class Held(NamedTuple):
    """Bytes that a runner holds, at the most.

    :param around: around the activation, whatever is cut.
    :param whole: with the whole [tokens, top-k, hidden] tensor.
    :param beside: beside a slice.
    :param column: for each column of a slice.
    """

    around: int
    whole: int
    beside: int
    column: int

    def in_slices(self, width: int) -> int:
        """In slices of so many columns."""
        return max(self.around, self.beside + width * self.column)


class TritonGemm(NamedTuple):
    """What slices of the Triton runner's second GEMM depend on, beside the layer's shape.

    :param tiles: the engine's configuration; no slice cuts a tile. ``None``: ignore what slices cost.
    :param quantized: its activations have one byte.
    :param activation_in_dead_input: the activation's output lies in memory that is allocated anyway.
    :param uses_staging: slices go to a staging buffer, which is copied into the output after the last GEMM.
    :param columns_per_scale: columns of the weights that share a scale (block quantization), or 1.
    :param scale_stride_bytes: distance from one column's (or block's) scales to the next one's.
    """

    tiles: Mapping[str, int] | None = None
    quantized: bool = False
    activation_in_dead_input: bool = False
    uses_staging: bool = False
    columns_per_scale: int = 1
    scale_stride_bytes: int = OPERAND_ALIGNMENT_BYTES

    @property
    def alignment_columns(self) -> int:
        """Slices start at multiples of this."""
        scales = OPERAND_ALIGNMENT_BYTES // gcd(OPERAND_ALIGNMENT_BYTES, self.scale_stride_bytes)
        tile = self.tiles["BLOCK_SIZE_N"] if self.tiles else 1
        return lcm(SLICE_ALIGNMENT_COLUMNS, tile, self.columns_per_scale * scales)

    @property
    def activation_bytes(self) -> int:
        return 1 if self.quantized else 2

    @property
    def has_slow_order(self) -> bool:
        """FP8 tiles of 128 rows that go through the columns before the rows (``GROUP_SIZE_M`` of 1).

        They were slower in two slices already (:data:`SLOW_ORDER_SLOWDOWN`).
        """
        assert self.tiles is not None
        return self.quantized and self.tiles.get("GROUP_SIZE_M") == 1 and self.tiles["BLOCK_SIZE_M"] >= 128

    @property
    def operations_per_us(self) -> float:
        assert self.tiles is not None
        is_small = self.tiles["BLOCK_SIZE_M"] * self.tiles["BLOCK_SIZE_N"] <= SMALL_TILE_ELEMENTS
        return (
            SMALL_TILE_OPERATIONS_PER_US
            if is_small and not self.quantized
            else OPERATIONS_PER_US[self.activation_bytes]
        )

    def slicing_us(self, layer: LayerShape, slices: int) -> float:
        """Microseconds that slicing costs: once, and for each slice but the first."""
        staging_us = 2 * layer.output_bytes / BYTES_PER_US if self.uses_staging else 0
        return SLICING_US + staging_us + (slices - 1) * _slice_us(SLICE_US[self.activation_bytes], layer.rows)

    def slowdown(self, layer: LayerShape, slices: int) -> float:
        """What so many slices cost, of the layer's time."""
        slowdown = self.slicing_us(layer, slices) / layer.layer_us(self.operations_per_us)
        return max(slowdown, SLOW_ORDER_SLOWDOWN) if self.has_slow_order else slowdown

    def inner_bytes(self, layer: LayerShape) -> int:
        """Bytes of the activation's output that the runner allocates."""
        return 0 if self.activation_in_dead_input else layer.itemsize * layer.rows * layer.intermediate

    def input_bytes(self, layer: LayerShape) -> int:
        """Bytes of the second GEMM's input, without its scales."""
        return layer.rows * layer.intermediate if self.quantized else self.inner_bytes(layer)

    def held(self, layer: LayerShape) -> Held:
        """What the runner holds (:func:`slice_width`)."""
        inner_bytes, input_bytes = self.inner_bytes(layer), self.input_bytes(layer)
        # Scales: at most four bytes for each group of 128.
        beside = input_bytes + (input_bytes // 32 if self.quantized else 0)
        return Held(
            around=layer.itemsize * layer.rows * layer.first_gemm_columns + inner_bytes,
            # A whole tensor's GEMM quantizes its input itself: both forms are alive.
            whole=layer.tensor_bytes + input_bytes + (inner_bytes if self.quantized else 0),
            beside=beside + (layer.output_bytes if self.uses_staging else 0),
            column=layer.rows * layer.itemsize,
        )


class MarlinGemm(NamedTuple):
    """What slices of Marlin's second GEMM depend on, beside the layer's shape.

    :param column_bytes: bytes of the weights and scales of one column, all experts together.
    :param output_in_dead_input: the final output lies in memory that is allocated anyway.
    """

    column_bytes: int
    output_in_dead_input: bool = False

    def slicing_us(self, layer: LayerShape, slices: int) -> float:
        """:meth:`TritonGemm.slicing_us`, with the copies of weights and scales."""
        copies_us = 2 * layer.hidden * self.column_bytes / MARLIN_COPIED_BYTES_PER_US
        return MARLIN_SLICING_US + copies_us + (slices - 1) * _slice_us(MARLIN_SLICE_US, layer.rows)

    def slowdown(self, layer: LayerShape, slices: int) -> float:
        """What so many slices cost, of the layer's time."""
        return self.slicing_us(layer, slices) / layer.layer_us(MARLIN_OPERATIONS_PER_US)

    def held(self, layer: LayerShape) -> Held:
        """What the runner holds (:func:`packed_slice_width`)."""
        inner_bytes = layer.rows * layer.intermediate * layer.itemsize
        return Held(
            around=layer.rows * layer.first_gemm_columns * layer.itemsize + inner_bytes,
            whole=inner_bytes + layer.output_bytes + layer.tensor_bytes,  # the engine's own allocates its output
            beside=inner_bytes + (0 if self.output_in_dead_input else layer.output_bytes),
            column=layer.rows * layer.itemsize + self.column_bytes,
        )


def slice_width(layer: LayerShape, gemm: TritonGemm, max_bytes: int | None = None, *, is_free: bool = False) -> int:
    """Columns of the second GEMM's output to compute and sum at a time; ``hidden``: the tensor is not cut.

    Narrower slices save memory, more of them cost time. Three bounds on their number:

    - Around the activation the runner holds the first GEMM's output, [rows, 2 x ``intermediate``], and the
      activation's, [rows, ``intermediate``]. Slices that fit into that beside the second GEMM's input (2 x
      ``intermediate`` columns, or 2.5 where it is quantized) save nothing more if narrower. With the activation's
      output in the dead input it is 2 x ``intermediate`` columns, or 1.5.
    - ``n`` slices hold 1/n of the tensor, so that one more saves about 1/n^2 of it. The number at which one more still
      saves :data:`MIN_BYTES_SAVED_PER_SLICE` is a square root.
    - They cost at most :data:`MAX_SLOWDOWN_FRACTION` of the layer's time (:func:`max_affordable_slices`).

    :param max_bytes: take the fewest slices with which the runner holds at most this, or what it holds around the
        activation, instead.
    :param is_free: as if slices cost nothing.
    """
    if max_bytes is None and layer.tensor_bytes < MIN_TENSOR_BYTES:
        return layer.hidden
    held = gemm.held(layer)
    if max_bytes is not None:
        return _fewest_slices_width(held, max_bytes, layer.hidden, gemm.alignment_columns)
    slices = min(
        -(-layer.tensor_bytes // (held.around - gemm.input_bytes(layer))),
        isqrt(layer.tensor_bytes // MIN_BYTES_SAVED_PER_SLICE),
    )
    if gemm.tiles is not None and not is_free:
        slices = min(slices, max_affordable_slices(layer, gemm))
    return _even_width(layer.hidden, slices, gemm.alignment_columns)


def packed_slice_width(
    layer: LayerShape, gemm: MarlinGemm, max_bytes: int | None = None, *, is_free: bool = False
) -> int:
    """:func:`slice_width` where each slice's weights and scales are copied first, as Marlin's packed ones must be.

    Around the activation the runner holds the outputs of the first GEMM and of the activation; while it runs slices,
    the latter, the final output, and for each column of a slice its values, weights and scales. Where the first GEMM's
    output is as wide as the layer there is nothing to save.
    """
    if layer.hidden <= layer.first_gemm_columns:
        return layer.hidden
    if max_bytes is None and layer.tensor_bytes < MIN_TENSOR_BYTES:
        return layer.hidden
    held = gemm.held(layer)
    if max_bytes is not None:
        return _fewest_slices_width(held, max_bytes, layer.hidden, MARLIN_ALIGNMENT_COLUMNS)
    slices = min(
        -(-layer.hidden // max(1, (held.around - held.beside) // held.column)),
        isqrt(layer.tensor_bytes // MIN_BYTES_SAVED_PER_SLICE),
    )
    if not is_free:
        budget_us = MAX_SLOWDOWN_FRACTION * layer.layer_us(MARLIN_OPERATIONS_PER_US) - gemm.slicing_us(layer, 1)
        slices = min(slices, _slices_within(budget_us, MARLIN_SLICE_US, layer.rows))
    return _even_width(layer.hidden, slices, MARLIN_ALIGNMENT_COLUMNS)


def advise(layer: LayerShape, gemm: TritonGemm | MarlinGemm, choose_width: Callable[..., int]) -> str:
    """What asks for the slices that the rule takes if they cost nothing; "": they save nothing.

    :param choose_width: :func:`slice_width` or :func:`packed_slice_width`.
    """
    held = gemm.held(layer)
    free_width = choose_width(layer, gemm, is_free=True)
    megabytes = ceil(held.in_slices(free_width) / 1e6)
    width = choose_width(layer, gemm, megabytes * 10**6)
    saved_bytes = max(held.around, held.whole) - held.in_slices(width)
    if free_width == layer.hidden or width == layer.hidden or saved_bytes <= 0:
        return ""
    slowdown = gemm.slowdown(layer, len(split_columns(layer.hidden, width)))
    return (
        f"{MOE_WORKSPACE_MB.name}={megabytes} asks for it: {saved_bytes / 1e6:,.0f} MB less, "
        f"about {1 + slowdown:.2f} of the layer's time"
    )


def max_affordable_slices(layer: LayerShape, gemm: TritonGemm) -> int:
    """How many slices cost at most :data:`MAX_SLOWDOWN_FRACTION` of the layer's time; at least one."""
    if gemm.has_slow_order:
        # Not where a test or a benchmark has lifted the limit.
        return 1 if MAX_SLOWDOWN_FRACTION < 1 else layer.rows
    rate = gemm.operations_per_us  # the tiles themselves are a dictionary, which has no hash
    return _max_affordable_slices(layer, gemm.quantized, gemm.uses_staging, rate, MAX_SLOWDOWN_FRACTION)


@functools.lru_cache
def _max_affordable_slices(
    layer: LayerShape, quantized: bool, uses_staging: bool, operations_per_us: float, max_slowdown_fraction: float
) -> int:
    gemm = TritonGemm(quantized=quantized, uses_staging=uses_staging)
    budget_us = max_slowdown_fraction * layer.layer_us(operations_per_us) - gemm.slicing_us(layer, 1)
    return _slices_within(budget_us, SLICE_US[gemm.activation_bytes], layer.rows)


def _slices_within(budget_us: float, slice_us: tuple[float, float], rows: int) -> int:
    """How many slices cost ``budget_us`` (the first one is free): at most one more than rows, for an endless budget."""
    return max(1, 1 + int(min(budget_us / _slice_us(slice_us, rows), rows)))


def _slice_us(slice_us: tuple[float, float], rows: int) -> float:
    """Microseconds of each slice but the first."""
    constant, for_each_row = slice_us
    return constant + rows * for_each_row


def _fewest_slices_width(held: Held, max_bytes: int, hidden: int, step: int) -> int:
    """The width of the fewest slices with which the runner holds ``max_bytes``; ``step`` if that is not possible."""
    limit = max(max_bytes, held.around)
    if held.whole <= limit:
        return hidden
    max_columns = (limit - held.beside) // held.column
    return _even_width(hidden, max(2, -(-hidden // max(step, max_columns // step * step))), step)


def _even_width(hidden: int, slices: int, step: int) -> int:
    """The width of so many slices, a multiple of ``step``; ``hidden`` for one slice."""
    return hidden if slices < 2 else min(hidden, -(-hidden // (slices * step)) * step)


def read_max_bytes() -> int | None:
    """Bytes that the runner may hold by :data:`MOE_WORKSPACE_MB`; ``None``: the limits above apply."""
    megabytes = MOE_WORKSPACE_MB.read()
    return None if megabytes is None else megabytes * 10**6


def min_tensor_bytes(max_bytes: int | None) -> int:
    """A smaller [tokens, top-k, hidden] tensor is not cut in the Triton runner: one comparison, ahead of all else.

    Where slices make a runner smaller that holds more than ``max_bytes``, at least a quarter of that is the tensor T.
    Beside T lie at most 1.5 times the activation A (in 16 bits and in one byte). Around the activation the runner holds
    at least 2 A whatever is cut: where T with what lies beside it is the peak, A is less than 2 T.
    """
    return MIN_TENSOR_BYTES if max_bytes is None else max_bytes // 4


def min_packed_tensor_bytes(max_bytes: int | None) -> int:
    """The same for Marlin: at least a third of what the runner holds uncut.

    The activation's output is narrower than the layer where anything is cut, and the final output has one row a token.
    """
    return MIN_TENSOR_BYTES if max_bytes is None else max_bytes // 3


def report_slices(runner: str, tensor_bytes: int, slices: int) -> None:
    """Log once for each runner of this process that its layers are cut."""
    message = log.format_line(
        "moe-workspace", "%s's [tokens, top-k, hidden] tensor of %.0f MB is cut into %d column slices"
    )
    log.once(logging.INFO, f"cut {runner}", message, runner, tensor_bytes / 1e6, slices)


def split_columns(columns: int, width: int) -> list[tuple[int, int]]:
    """``(start, stop)`` of each column slice of at most ``width`` columns, in order."""
    return [(start, min(start + width, columns)) for start in range(0, columns, width)]
