"""Sum one column slice over the top-k, and copy the weights and scales of the next one, in one launch.

Neither reads what the other writes. Separate launches would each wait until the one before has drained from the GPU,
and the scales' copy is too small to fill it. PyTorch's own copy of a column slice moves one element at a time; this one
moves sixteen bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sglang_moe_patches.changes.moe_workspace.kernels import moe_sum

try:
    import triton
    import triton.language as tl
except ImportError:  # not in CPU builds of PyTorch, where nothing calls the kernel
    triton = None


if triton is not None:

    @triton.jit
    def _copy_block(program, source_ptr, target_ptr, source_stride, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Copy a block of one row."""
        blocks = tl.cdiv(words, BLOCK)
        row = (program // blocks).to(tl.int64)
        word = program % blocks * BLOCK + tl.arange(0, BLOCK)
        mask = word < words
        values = tl.load(source_ptr + row * source_stride + word, mask=mask)
        tl.store(target_ptr + row * words + word, values, mask=mask)

    @triton.jit(do_not_specialize=["first_programs", "copy_programs"])
    def _sum_and_copy_kernel(  # type: ignore[no-untyped-def]
        expert_outputs_ptr,
        output_ptr,
        scale,
        columns,
        output_stride,
        first_source_ptr,
        first_target_ptr,
        first_stride,
        first_words,
        second_source_ptr,
        second_target_ptr,
        second_stride,
        second_words,
        first_programs,
        copy_programs,
        TOP_K: tl.constexpr,
        BLOCK: tl.constexpr,
        FIRST_BLOCK: tl.constexpr,
        SECOND_BLOCK: tl.constexpr,
    ):
        """A block of the first copy, of the second copy, or of the sum."""
        program = tl.program_id(0)
        if program < first_programs:
            _copy_block(program, first_source_ptr, first_target_ptr, first_stride, first_words, FIRST_BLOCK)
        elif program < copy_programs:
            program -= first_programs
            _copy_block(program, second_source_ptr, second_target_ptr, second_stride, second_words, SECOND_BLOCK)
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


def _as_words(source: torch.Tensor, start: int, stop: int, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The source from ``start`` on, and the target, as rows of words of eight bytes."""
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
    """:func:`moe_sum.moe_sum` of the first three, and ``target = source[..., start:stop]`` of each of ``copies``.

    :param expert_outputs: of no tokens before the first slice.
    :param copies: source, start, stop and target, of the weights and of the scales; none after the last slice. Source
        and target are contiguous and of one dtype, whatever it is; rows, ``start`` and ``stop`` are at whole words of
        eight bytes.
    """
    if not copies:
        moe_sum.moe_sum(expert_outputs, output, scale)
        return
    tokens, top_k, columns = moe_sum.check_shapes(expert_outputs, output)
    block = moe_sum.choose_block(columns)
    arguments, blocks, programs = [], [], []
    for source, target in (_as_words(*one) for one in copies):
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
        FIRST_BLOCK=blocks[0],
        SECOND_BLOCK=blocks[1],
        num_warps=max(1, block // 256),
    )
