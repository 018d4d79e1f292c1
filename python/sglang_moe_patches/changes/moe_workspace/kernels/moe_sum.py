"""Triton kernel that sums expert outputs over the top-k into a column slice of a layer's output.

The engine's own sums need a contiguous output. This kernel writes a slice to its place in the output. It adds in
float32, in the order of the top-k, multiplies once and rounds once. The engine's ``moe_sum_reduce`` (CUDA) and
``moe_sum_reduce_triton`` do the same, so the results are equal bit for bit.
"""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch have no Triton, and no code calls the kernel there
    triton = None

#: Largest number of columns that one program sums. A thread loads 8 elements of 16 bits, which is one 16-byte load.
MAX_BLOCK_COLUMNS = 1024

if triton is not None:

    @triton.jit
    def sum_block(  # type: ignore[no-untyped-def]
        token,
        block,
        expert_outputs_ptr,
        output_ptr,
        scale,
        columns,
        output_stride,
        TOP_K: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Sum one token's expert outputs in one block of columns, and store the result in the output."""
        column = block * BLOCK + tl.arange(0, BLOCK)
        mask = column < columns
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for expert in tl.static_range(TOP_K):
            row = expert_outputs_ptr + (token * TOP_K + expert) * columns
            total += tl.load(row + column, mask=mask, other=0.0).to(tl.float32)
        total *= scale
        tl.store(output_ptr + token * output_stride + column, total.to(output_ptr.dtype.element_ty), mask=mask)

    @triton.jit
    def _moe_sum_kernel(  # type: ignore[no-untyped-def]
        expert_outputs_ptr,
        output_ptr,
        scale,
        columns,
        output_stride,
        TOP_K: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
        sum_block(token, block, expert_outputs_ptr, output_ptr, scale, columns, output_stride, TOP_K, BLOCK)


def check_shapes(expert_outputs: torch.Tensor, output: torch.Tensor) -> tuple[int, int, int]:
    """Check the tensors that :func:`moe_sum` receives, and return the numbers of tokens, top-k and columns."""
    tokens, top_k, columns = expert_outputs.shape
    assert expert_outputs.is_contiguous()
    assert output.shape == (tokens, columns)
    assert output.stride(1) == 1
    return tokens, top_k, columns


def choose_block(columns: int) -> int:
    """Return the number of columns that one program of the kernel sums, for a slice of ``columns`` columns."""
    return min(MAX_BLOCK_COLUMNS, int(triton.next_power_of_2(columns)))


def moe_sum(expert_outputs: torch.Tensor, output: torch.Tensor, scale: float) -> None:
    """Write ``output[t, c] = scale * sum over k of expert_outputs[t, k, c]`` with the Triton kernel.

    :param expert_outputs: [tokens, top-k, columns], contiguous, 16-bit floating point.
    :param output: [tokens, columns] of the same dtype. The elements of a row are adjacent in memory. Rows may be any
        distance apart.
    :param scale: the model's routed scaling factor.
    """
    tokens, top_k, columns = check_shapes(expert_outputs, output)
    block = choose_block(columns)
    _moe_sum_kernel[(tokens, triton.cdiv(columns, block))](
        expert_outputs,
        output,
        scale,
        columns,
        output.stride(0),
        TOP_K=top_k,
        BLOCK=block,
        num_warps=max(1, block // 256),
    )


def moe_sum_torch(expert_outputs: torch.Tensor, output: torch.Tensor, scale: float) -> None:
    """Compute the result of :func:`moe_sum` in plain PyTorch, term by term, as a reference for tests of the kernel."""
    total = torch.zeros_like(output, dtype=torch.float32)
    for expert in range(expert_outputs.shape[1]):
        total += expert_outputs[:, expert].float()
    output.copy_((total * scale).to(output.dtype))
