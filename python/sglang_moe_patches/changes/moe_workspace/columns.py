"""How wide the slices of columns are: pure functions of plain sizes."""

from __future__ import annotations

from math import lcm

#: A [tokens, top-k, hidden] tensor smaller than this stays whole.
SMALLEST_TENSOR_BYTES = 192 << 20
#: A slice holds at least about this much: the GPU must take longer over it than the host takes to start it.
SMALLEST_SLICE_BYTES = 96 << 20
#: Slices start at multiples of this many columns, and of four block scales: every operand of a slice (weights, scales,
#: bias, output) then starts at a multiple of 16 bytes, as the whole does, and Triton runs the kernel compiled for that.
ALIGNMENT = 256


def slice_width(
    tokens: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    itemsize: int,
    *,
    block_columns: int = 1,
    scale_columns: int = 1,
) -> int:
    """Columns of the second GEMM's output to compute and sum at a time; ``hidden`` where it stays whole.

    A slice of 2 x ``intermediate`` columns fits the memory that the first GEMM's output [tokens x top-k,
    2 x intermediate] has just given back: narrower ones save nothing more. Wider ones are taken where such a slice
    would be too little work.

    :param tokens: rows of the layer's input.
    :param top_k: experts of a token.
    :param hidden: columns of the output.
    :param intermediate: the experts' intermediate size on this rank.
    :param itemsize: bytes of an output element.
    :param block_columns: columns of a tile of the second GEMM (``BLOCK_SIZE_N``); no slice cuts one.
    :param scale_columns: columns that share a scale of the weights (block quantization), or 1.
    """
    tensor_bytes = tokens * top_k * hidden * itemsize
    if tensor_bytes < SMALLEST_TENSOR_BYTES:
        return hidden
    slices = min(-(-hidden // (2 * intermediate)), tensor_bytes // SMALLEST_SLICE_BYTES)
    if slices < 2:
        return hidden
    step = lcm(ALIGNMENT, block_columns, 4 * scale_columns if scale_columns > 1 else 1)
    return min(hidden, -(-hidden // (slices * step)) * step)


def ranges(columns: int, width: int) -> list[tuple[int, int]]:
    """``(start, stop)`` of each slice of at most ``width`` columns, in order."""
    return [(start, min(start + width, columns)) for start in range(0, columns, width)]
