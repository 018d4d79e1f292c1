"""Triton kernel that sums one column slice over the top-k and copies the next slice's weights and scales.

The sum and the copies are independent, so one launch runs them together. Separate launches would run one after the
other, and the copy of the scales is too small to fill the GPU. PyTorch's own copy of a column slice moves one element
at a time. This kernel moves sixteen bytes at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sglang_moe_patches.changes.moe_workspace.kernels import moe_sum

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch have no Triton, and no code calls the kernel there
    triton = None


if triton is not None:

    @triton.jit
    def _copy_block(program, source_ptr, target_ptr, source_stride, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Copy one block of eight-byte words of one row from ``source`` to ``target``.

        :param program: number of the block among all blocks of all rows.
        """
        blocks = tl.cdiv(words, BLOCK)
        row = (program // blocks).to(tl.int64)
        word = program % blocks * BLOCK + tl.arange(0, BLOCK)
        mask = word < words
        values = tl.load(source_ptr + row * source_stride + word, mask=mask)
        tl.store(target_ptr + row * words + word, values, mask=mask)

    @triton.jit(do_not_specialize=["weights_programs", "copy_programs"])
    def _sum_and_copy_kernel(  # type: ignore[no-untyped-def]
        expert_outputs_ptr,
        output_ptr,
        scale,
        columns,
        output_stride,
        weights_ptr,
        weights_copy_ptr,
        weights_stride,
        weights_words,
        scales_ptr,
        scales_copy_ptr,
        scales_stride,
        scales_words,
        weights_programs,
        copy_programs,
        TOP_K: tl.constexpr,
        BLOCK: tl.constexpr,
        WEIGHTS_BLOCK: tl.constexpr,
        SCALES_BLOCK: tl.constexpr,
    ):
        """Copy one block of the weights, copy one block of the scales, or sum one block of columns.

        The first programs of the grid copy weights, the next programs copy scales, and all others sum.
        """
        program = tl.program_id(0)
        if program < weights_programs:
            _copy_block(program, weights_ptr, weights_copy_ptr, weights_stride, weights_words, WEIGHTS_BLOCK)
        elif program < copy_programs:
            program -= weights_programs
            _copy_block(program, scales_ptr, scales_copy_ptr, scales_stride, scales_words, SCALES_BLOCK)
        else:
            program -= copy_programs
            blocks = tl.cdiv(columns, BLOCK)
            moe_sum.sum_block(
                (program // blocks).to(tl.int64),
                program % blocks,
                expert_outputs_ptr,
                output_ptr,
                scale,
                columns,
                output_stride,
                TOP_K,
                BLOCK,
            )


def _view_as_words(
    source: torch.Tensor, start: int, stop: int, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of ``source`` and ``target`` as two-dimensional matrices of eight-byte words.

    The last dimension of each tensor becomes the columns of its matrix, and all other dimensions become the rows. The
    view of ``source`` begins at column ``start``. It does not end at ``stop``, because the kernel takes the number of
    words to copy from ``target``.

    :param stop: end of the columns to copy. It is only compared with the shape of ``target``.
    """
    assert source.is_contiguous()
    assert target.is_contiguous()
    assert target.shape == (*source.shape[:-1], stop - start)
    assert target.dtype == source.dtype
    from_words, to_words = (t.view(-1, t.shape[-1]).view(torch.int64) for t in (source, target))
    return from_words[:, start * source.itemsize // 8 :], to_words


def sum_and_copy(
    expert_outputs: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    copies: Sequence[tuple[torch.Tensor, int, int, torch.Tensor]],
) -> None:
    """Sum one column slice over the top-k and copy the next slice's weights and scales, in one launch.

    The sum is ``moe_sum(expert_outputs, output, scale)`` (:func:`.moe_sum.moe_sum`). Each copy is ``target =
    source[..., start:stop]``.

    :param expert_outputs: [tokens, top-k, columns]. Before the first slice there is nothing to sum, and the tensor has
        no tokens.
    :param output: [tokens, columns].
    :param scale: factor of the sum.
    :param copies: one tuple ``(source, start, stop, target)`` for the weights, and one for the scales. After the last
        slice ``copies`` is empty. Source and target are contiguous and have the same dtype. In bytes, the length of a
        row and the positions of columns ``start`` and ``stop`` in a row are multiples of 8.
    """
    if not copies:
        moe_sum.moe_sum(expert_outputs, output, scale)
        return
    tokens, top_k, columns = moe_sum.check_shapes(expert_outputs, output)
    block = moe_sum.choose_block(columns)
    arguments, blocks, programs = [], [], []
    for source, target in (_view_as_words(*one) for one in copies):
        rows, words = target.shape
        blocks.append(min(block, triton.next_power_of_2(words)))
        programs.append(rows * triton.cdiv(words, blocks[-1]))
        arguments += [source, target, source.stride(0), words]
    _sum_and_copy_kernel[(sum(programs) + tokens * triton.cdiv(columns, block),)](
        *(expert_outputs, output, scale, columns, output.stride(0)),
        *arguments,
        programs[0],
        sum(programs),
        TOP_K=top_k,
        BLOCK=block,
        WEIGHTS_BLOCK=blocks[0],
        SCALES_BLOCK=blocks[1],
        num_warps=max(1, block // 256),
    )
