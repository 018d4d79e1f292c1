"""How wide the slices of columns are: pure functions of plain sizes."""

from __future__ import annotations

from math import gcd, isqrt, lcm

#: A [tokens, top-k, hidden] tensor smaller than this stays whole.
SMALLEST_TENSOR_BYTES = 192 << 20
#: What one more slice must save. It costs some 25 microseconds: its start, its last wave, its activations read again.
WORTH_A_SLICE_BYTES = 36 << 20
#: Slices start at multiples of this many columns.
ALIGNMENT = 256
#: Triton compiles a kernel for operands that start at multiples of this, and another one for operands that do not.
OPERAND_BYTES = 16


def slice_width(
    tokens: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    itemsize: int,
    *,
    activation_itemsize: int | None = None,
    activation_elsewhere: bool = False,
    block_columns: int = 1,
    scale_columns: int = 1,
    scale_bytes: int = OPERAND_BYTES,
) -> int:
    """Columns of the second GEMM's output to compute and sum at a time; ``hidden`` where it stays whole.

    Narrower slices save memory, more of them cost time. Two bounds on their number:

    - Around the activation the runner holds the outputs of the first GEMM and of the activation, [tokens x top-k,
      2 x ``intermediate``] and [tokens x top-k, ``intermediate``]. Slices that fit into that beside the second GEMM's
      input (2 x ``intermediate`` columns, or 2.5 where it is quantized to one byte) save nothing more if narrower.
      Where the activation's output lies in memory that is there anyway, it is 2 x ``intermediate`` columns, or 1.5.
    - ``n`` slices hold 1/n of the tensor, and one more saves 1/n - 1/(n + 1), or about 1/n^2, of it. So the number at
      which one more is still worth it is the square root of the tensor's bytes over :data:`WORTH_A_SLICE_BYTES`.

    :param tokens: rows of the layer's input.
    :param top_k: experts of a token.
    :param hidden: columns of the output.
    :param intermediate: the experts' intermediate size on this rank.
    :param itemsize: bytes of an output element.
    :param activation_itemsize: bytes of an element of the second GEMM's input; the same without quantization.
    :param activation_elsewhere: the activation's output lies in memory that is there anyway.
    :param block_columns: columns of a tile of the second GEMM (``BLOCK_SIZE_N``); no slice cuts one.
    :param scale_columns: columns that share a scale of the weights (block quantization), or 1.
    :param scale_bytes: from the scale of one column, or block of columns, to the next one's.
    """
    tensor_bytes = tokens * top_k * hidden * itemsize
    if tensor_bytes < SMALLEST_TENSOR_BYTES:
        return hidden
    quantized = activation_itemsize is not None and activation_itemsize < itemsize
    free = (2 if activation_elsewhere else 3) * intermediate
    if quantized or not activation_elsewhere:
        free -= intermediate * (activation_itemsize or itemsize) // itemsize
    slices = min(-(-hidden // free), isqrt(tensor_bytes // WORTH_A_SLICE_BYTES))
    if slices < 2:
        return hidden
    step = lcm(ALIGNMENT, block_columns, scale_columns * (OPERAND_BYTES // gcd(OPERAND_BYTES, scale_bytes)))
    return min(hidden, -(-hidden // (slices * step)) * step)


def ranges(columns: int, width: int) -> list[tuple[int, int]]:
    """``(start, stop)`` of each slice of at most ``width`` columns, in order."""
    return [(start, min(start + width, columns)) for start in range(0, columns, width)]
