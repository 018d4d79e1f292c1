"""How wide the slices of columns are: pure functions of plain sizes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from math import gcd, isqrt, lcm

from sglang_moe_patches.core.variables import Variable, positive_number

MOE_WORKSPACE_MB: Variable[int | None] = Variable(
    "SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB",
    "MB (10^6 bytes) that Triton or Marlin may hold, where columns can; unset: what costs at most 2 % of the time",
    positive_number("MB"),
)

#: A [tokens, top-k, hidden] tensor smaller than this stays whole.
MIN_TENSOR_BYTES = 192 << 20
#: What one more slice must save, whatever it costs.
MIN_BYTES_SAVED_PER_SLICE = 36 << 20
#: Slices start at multiples of this many columns.
ALIGNMENT = 256
#: Triton compiles a kernel for operands that start at multiples of this, and another one for operands that do not.
OPERAND_BYTES = 16
#: What the slices may cost, of the layer's time.
MAX_SLOWDOWN_FRACTION = 0.02
#: Microseconds that slices cost on an H200, by the bytes of an activation's element: START_US once, and for each slice
#: after the first SLICE_US[0] (its launch, its last wave) and SLICE_US[1] for each row (activations are read again).
START_US = 10.0
SLICE_US = {1: (10.0, 3e-4), 2: (30.0, 5e-5)}
#: What an H200 does in a microsecond: operations of the engine's tuned tiles, by the bytes of an activation, and of the
#: small ones that it takes where nobody tuned any (16 bits); bytes.
OPERATIONS_PER_US = {1: 0.7e9, 2: 0.8e9}
SMALL_TILE, SMALL_TILE_OPERATIONS_PER_US = 64 * 64, 0.25e9
BYTES_PER_US = 4.0e6
#: The same for Marlin; and how many bytes of the second GEMM's weights and scales are copied in a microsecond.
MARLIN_START_US = 10.0
MARLIN_SLICE_US = (15.0, 3.0e-4)
MARLIN_OPERATIONS_PER_US = 0.25e9
MARLIN_COPIED_BYTES_PER_US = 2.5e6
#: Marlin's slices start at multiples of the first number of columns; its launches take multiples of the second.
MARLIN_ALIGNMENT, MARLIN_TILE = 256, 128


def slice_width(
    tokens: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    itemsize: int,
    *,
    activation_itemsize: int | None = None,
    activation_elsewhere: bool = False,
    copied: bool = False,
    gate_columns: int | None = None,
    weight_bytes: int = 0,
    share: float = 1.0,
    tiles: Mapping[str, int] | None = None,
    scale_columns: int = 1,
    scale_bytes: int = OPERAND_BYTES,
    most_bytes: int | None = None,
) -> int:
    """Columns of the second GEMM's output to compute and sum at a time; ``hidden`` where it stays whole.

    Narrower slices save memory, more of them cost time. Three bounds on their number:

    - Around the activation the runner holds the outputs of the first GEMM and of the activation, [tokens x top-k,
      2 x ``intermediate``] and [tokens x top-k, ``intermediate``]. Slices that fit into that beside the second GEMM's
      input (2 x ``intermediate`` columns, or 2.5 where it is quantized to one byte) save nothing more if narrower.
      Where the activation's output lies in memory that is there anyway, it is 2 x ``intermediate`` columns, or 1.5.
    - ``n`` slices hold 1/n of the tensor, and one more saves 1/n - 1/(n + 1), or about 1/n^2, of it. So the number at
      which one more is still worth it is the square root of the tensor's bytes over :data:`MIN_BYTES_SAVED_PER_SLICE`.
    - They cost no more than :data:`MAX_SLOWDOWN_FRACTION` of what the layer takes (:func:`affordable`).

    With ``most_bytes`` it is the fewest slices with which the runner's memory is no more than that, or than what it
    holds around the activation.

    :param tokens: rows of the layer's input.
    :param top_k: experts of a token.
    :param hidden: columns of the output.
    :param intermediate: the experts' intermediate size on this rank.
    :param itemsize: bytes of an output element.
    :param activation_itemsize: bytes of an element of the second GEMM's input; the same without quantization.
    :param activation_elsewhere: the activation's output lies in memory that is there anyway.
    :param copied: all slices but the last go to memory of their own first, and are copied to the output in the end.
    :param gate_columns: of the first GEMM's output; ``None``: twice ``intermediate``.
    :param weight_bytes: of both GEMMs.
    :param share: of the rows, those whose expert is here (expert parallelism).
    :param tiles: of the second GEMM, in the engine's words. No slice cuts one; ``None``: whatever slices cost.
    :param scale_columns: columns that share a scale of the weights (block quantization), or 1.
    :param scale_bytes: from the scale of one column, or block of columns, to the next one's.
    :param most_bytes: what the runner may hold.
    """
    rows, quantized = tokens * top_k, activation_itemsize is not None and activation_itemsize < itemsize
    gate_columns = gate_columns or 2 * intermediate
    step = lcm(
        ALIGNMENT,
        tiles["BLOCK_SIZE_N"] if tiles else 1,
        scale_columns * (OPERAND_BYTES // gcd(OPERAND_BYTES, scale_bytes)),
    )
    around = rows * itemsize * (gate_columns + (0 if activation_elsewhere else intermediate))
    beside = 0
    if quantized or not activation_elsewhere:
        beside = rows * intermediate * (activation_itemsize or itemsize)
    tensor_bytes, output_bytes = rows * hidden * itemsize, tokens * hidden * itemsize if copied else 0
    if most_bytes is not None:
        # Whole, an input that is quantized is there in both forms.
        whole = (
            tensor_bytes + beside + (rows * intermediate * itemsize if quantized and not activation_elsewhere else 0)
        )
        most = max(most_bytes, around)
        beside += beside // 32 if quantized else 0  # their scales: four bytes for each group of 128, at the most
        return hidden if whole <= most else _widest((most - beside - output_bytes) // (rows * itemsize), hidden, step)
    if tensor_bytes < MIN_TENSOR_BYTES:
        return hidden
    slices = min(-(-tensor_bytes // (around - beside)), isqrt(tensor_bytes // MIN_BYTES_SAVED_PER_SLICE))
    if tiles is not None:
        slices = min(
            slices,
            affordable(
                rows,
                hidden,
                intermediate + gate_columns,
                tiles,
                activation_itemsize=1 if quantized else 2,
                weight_bytes=weight_bytes,
                share=share,
                moved_bytes=2 * tensor_bytes,
                copied_bytes=2 * output_bytes,
            ),
        )
    return _even(hidden, slices, step)


def packed_slice_width(
    tokens: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    itemsize: int,
    *,
    gate_columns: int,
    column_bytes: int,
    weight_bytes: int,
    share: float = 1.0,
    output_elsewhere: bool = False,
    most_bytes: int | None = None,
    most_time: float | None = None,
) -> int:
    """:func:`slice_width` where a slice's weights and scales are copied first, as Marlin's packed ones must be.

    Around the activation the runner holds the outputs of the first GEMM and of the activation; while it runs slices,
    the latter, the final output, and for each column of a slice its values, weights and scales.

    :param gate_columns: of the first GEMM's output. Where it is as wide as the layer there is nothing to save.
    :param column_bytes: of the second GEMM's weights and scales in a column, all experts together.
    :param weight_bytes: of both GEMMs' weights and scales.
    :param output_elsewhere: the output lies in memory that is there anyway.
    :param most_time: that slices may cost, of the layer's; ``None``: :data:`MAX_SLOWDOWN_FRACTION`.
    """
    rows, output_bytes = tokens * top_k, tokens * hidden * itemsize
    tensor_bytes = rows * hidden * itemsize
    around = rows * (gate_columns + intermediate) * itemsize
    beside = rows * intermediate * itemsize + (0 if output_elsewhere else output_bytes)
    column = rows * itemsize + column_bytes
    if hidden <= gate_columns:
        return hidden
    if most_bytes is not None:
        most = max(most_bytes, around)
        if beside + tensor_bytes <= most:
            return hidden
        return _widest((most - beside) // column, hidden, MARLIN_ALIGNMENT)
    if tensor_bytes < MIN_TENSOR_BYTES:
        return hidden
    layer = 2 * rows * share * hidden * (intermediate + gate_columns) / MARLIN_OPERATIONS_PER_US
    layer += (weight_bytes + 2 * tensor_bytes) / BYTES_PER_US
    once, for_each_row = MARLIN_SLICE_US
    copies = 2 * hidden * column_bytes / MARLIN_COPIED_BYTES_PER_US
    left = (MAX_SLOWDOWN_FRACTION if most_time is None else most_time) * layer - MARLIN_START_US - copies
    slices = min(
        -(-hidden // max(1, (around - beside) // column)),
        isqrt(tensor_bytes // MIN_BYTES_SAVED_PER_SLICE),
        _within(left, once + rows * for_each_row, rows),
    )
    return _even(hidden, slices, MARLIN_ALIGNMENT)


def _widest(columns: int, hidden: int, step: int) -> int:
    """The width of the fewest slices, two at least, none of which has more than ``columns``; ``step``, if none does."""
    slices = max(2, -(-hidden // max(step, columns // step * step)))
    return _even(hidden, slices, step)


def _even(hidden: int, slices: int, step: int) -> int:
    """The width of so many slices, all but the last of one width in whole steps; ``hidden`` if it is one."""
    return hidden if slices < 2 else min(hidden, -(-hidden // (slices * step)) * step)


def _within(us: float, slice_us: float, rows: int) -> int:
    """The most slices that cost no more than ``us``, at most one more than rows; the first costs nothing."""
    return max(1, 1 + int(min(us / slice_us, rows)))


@functools.lru_cache
def _affordable(
    rows: int,
    hidden: int,
    inner: int,
    activation_itemsize: int,
    read_bytes: int,
    share: float,
    copied_bytes: int,
    small_tiles: bool,
    most: float,
) -> int:
    rate = SMALL_TILE_OPERATIONS_PER_US if small_tiles else OPERATIONS_PER_US[activation_itemsize]
    layer = 2 * rows * share * hidden * inner / rate + read_bytes / BYTES_PER_US
    once, for_each_row = SLICE_US[activation_itemsize]
    left = most * layer - START_US - copied_bytes / BYTES_PER_US
    return _within(left, once + rows * for_each_row, rows)


def affordable(
    rows: int,
    hidden: int,
    inner: int,
    tiles: Mapping[str, int],
    *,
    activation_itemsize: int,
    weight_bytes: int,
    moved_bytes: int,
    share: float = 1.0,
    copied_bytes: int = 0,
) -> int:
    """How many slices cost no more than :data:`MAX_SLOWDOWN_FRACTION` of what the layer takes; one at least.

    The constants are fitted to benchmark/results/moe-workspace. FP8 tiles of 128 rows that go through the columns
    before the rows (``GROUP_SIZE_M`` of 1) were slower by 3 to 7 % in two slices already.

    :param inner: columns of the first GEMM's output, and rows of the second one's weights.
    :param moved_bytes: of the [tokens, top-k, hidden] tensor, written and read.
    :param copied_bytes: of the output, read and written once more.
    """
    if activation_itemsize == 1 and tiles.get("GROUP_SIZE_M") == 1 and tiles["BLOCK_SIZE_M"] >= 128:
        return 1 if MAX_SLOWDOWN_FRACTION < 1 else rows
    return _affordable(
        rows,
        hidden,
        inner,
        activation_itemsize,
        weight_bytes + moved_bytes,
        share,
        copied_bytes,
        activation_itemsize == 2 and tiles["BLOCK_SIZE_M"] * tiles["BLOCK_SIZE_N"] <= SMALL_TILE,
        MAX_SLOWDOWN_FRACTION,
    )


def most_bytes() -> int | None:
    """What the runner may hold by :data:`MOE_WORKSPACE_MB`."""
    most = MOE_WORKSPACE_MB.read()
    return None if most is None else most * 10**6


def smallest_tensor(most: int | None) -> int:
    """Bytes of the smallest [tokens, top-k, hidden] tensor that may be cut.

    :param most: what the runner may hold, or ``None``. More than it, beside its activations, are at least two thirds:
        where these are wider than half the output, the runner's peak is around the activation, cut or not.
    """
    return MIN_TENSOR_BYTES if most is None else 2 * most // 3


def smallest_packed_tensor(most: int | None) -> int:
    """The same for :func:`packed_slice_width`: of what the runner holds whole, it is at least a third.

    The activation's output is narrower than the layer where anything is cut, and the final output has a row a token.
    """
    return MIN_TENSOR_BYTES if most is None else most // 3


def ranges(columns: int, width: int) -> list[tuple[int, int]]:
    """``(start, stop)`` of each slice of at most ``width`` columns, in order."""
    return [(start, min(start + width, columns)) for start in range(0, columns, width)]
