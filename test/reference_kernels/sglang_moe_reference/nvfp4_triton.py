"""The reference kernels on a GPU: NVFP4 quantization and the routed experts in Triton, for real sizes.

Weights stay packed in the TRT-LLM layout. Each program decodes only the strip of FP4 weights that it multiplies. One
index table of rows serves all experts of a tensor, because they have the same permutation. A *slot* is a (token,
expert) pair; its number is token * top_k + k.

- The kernels can be captured in a CUDA graph. They do not synchronize with the host, and all shapes depend only on the
  shapes of the arguments.
- The kernels are deterministic, and a token's result does not depend on the rest of the batch. Tiles have the same size
  in every batch, the rows of a tile do not mix, no sum is atomic, and a token's experts are added in the order of their
  numbers.
- Scratch memory is at most about ``SCRATCH_BYTES`` for any number of tokens. The tokens are computed in several passes,
  and the result in strips of columns.

An E2M1 value times its E4M3 block scale has six significant bits and lies between 2**-10 and 2688, so float16
represents it exactly. The kernels accumulate products in float32, but :mod:`~sglang_moe_reference.flashinfer_kernels`
accumulates in float64. An intermediate result near a rounding boundary of NVFP4 may therefore be rounded to another
code here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from sglang_moe_reference.nvfp4 import BLOCK_SIZE, E4M3_MAX

if TYPE_CHECKING:
    from sglang_moe_reference.flashinfer_kernels import _Layer

SCRATCH_BYTES = 64 << 20
"""Limit of the scratch memory of one call in bytes. The result and the index lists, with a few bytes per token and
expert, do not count.
"""

# All batches use the same tile sizes. Otherwise a token's result would depend on the number of other tokens.
_BLOCK_M, _BLOCK_N, _BLOCK_BYTES = 64, 64, 64


@triton.jit
def _e2m1(code):  # type: ignore[no-untyped-def]
    """Return the float32 values of E2M1 codes (int32, 0 to 15)."""
    # Twice the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 are the nibbles of this number.
    magnitude = ((0xC8643210 >> ((code & 7) * 4).to(tl.uint32)) & 15).to(tl.float32)
    return tl.where((code & 8) == 0, 0.5, -0.5) * magnitude


@triton.jit
def _decoded(packed, scale):  # type: ignore[no-untyped-def]
    """Decode NVFP4 data: packed [ROWS, BYTES] with scale [ROWS, BYTES/8].

    Return the even and the odd elements, float16 [ROWS, BYTES] each.

    A product over K may add the even and the odd elements separately, so they need not be interleaved.
    """
    ROWS: tl.constexpr = packed.shape[0]
    BYTES: tl.constexpr = packed.shape[1]
    scale = tl.broadcast_to(scale.to(tl.float32)[:, :, None], (ROWS, BYTES // 8, 8)).reshape(ROWS, BYTES)
    code = packed.to(tl.int32)
    return (_e2m1(code) * scale).to(tl.float16), (_e2m1(code >> 4) * scale).to(tl.float16)


@triton.jit
def _activations(  # type: ignore[no-untyped-def]
    x_ptr, x_scale_ptr, row, mine, first_byte, K_BYTES: tl.constexpr, BYTES: tl.constexpr
):
    """Decode a strip of columns of NVFP4 rows (see ``_decoded``). Rows for which ``mine`` is false become zero."""
    byte = first_byte + tl.arange(0, BYTES)
    group = first_byte // 8 + tl.arange(0, BYTES // 8)
    inside = mine[:, None] & (byte < K_BYTES)[None, :]
    packed = tl.load(x_ptr + row[:, None] * K_BYTES + byte[None, :], mask=inside, other=0)
    inside = mine[:, None] & (group < K_BYTES // 8)[None, :]
    scale = tl.load(x_scale_ptr + row[:, None] * (K_BYTES // 8) + group[None, :], mask=inside, other=0.0)
    return _decoded(packed, scale)


@triton.jit
def _multiplied(  # type: ignore[no-untyped-def]
    even,
    odd,
    weights_ptr,
    scales_ptr,
    rows,
    scale_rows,
    first_byte,
    K_BYTES: tl.constexpr,
    acc,
    BYTES: tl.constexpr,
):
    """Return acc + activations @ weights.T for a strip of K: [M, N] + [M, strip] @ [N, strip].T. The weights are rows
    of one expert, in the TRT-LLM layout.
    """
    byte = first_byte + tl.arange(0, BYTES)
    column = first_byte // 8 + tl.arange(0, BYTES // 8)
    packed = tl.load(weights_ptr + rows[:, None] * K_BYTES + byte[None, :], mask=byte[None, :] < K_BYTES, other=0)
    # The scales lie in tiles of 128 rows by 4 columns. Within a tile, rows 32 apart are neighbours.
    tile = (scale_rows // 128)[:, None] * (K_BYTES // 32) + (column // 4)[None, :]
    inside = (scale_rows % 32 * 16 + scale_rows % 128 // 32 * 4)[:, None] + (column % 4)[None, :]
    scale = tl.load(scales_ptr + tile * 512 + inside, mask=column[None, :] < K_BYTES // 8, other=0.0)
    weight_even, weight_odd = _decoded(packed, scale)
    acc = tl.dot(even, tl.trans(weight_even), acc)
    return tl.dot(odd, tl.trans(weight_odd), acc)


@triton.jit
def _rounded_to_e4m3(x):  # type: ignore[no-untyped-def]
    """Round non-negative float32 to the nearest E4M3 number, ties to even. A cast would round incorrectly in Triton's
    interpreter."""
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) - 127, -6)
    # At the magnitude of this number, float32 has the same step size as E4M3.
    large = ((exponent + 20 + 127) << 23).to(tl.float32, bitcast=True)
    return (x + large) - large


@triton.jit
def _quantized(x, multiplier):  # type: ignore[no-untyped-def]
    """Quantize float32 x [M, N] with the bits of ``nvfp4.quantize``: packed uint8 [M, N/2], E4M3 block scales [M,
    N/16]."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    blocks = x.reshape(M, N // 16, 16)
    wanted = multiplier * (tl.max(tl.abs(blocks), axis=2) * (1 / 6))
    block_scale = _rounded_to_e4m3(tl.minimum(wanted, 448.0)).to(tl.float8e4nv)
    decoded = block_scale.to(tl.float32)
    # These divisions are rounded correctly. Triton's / is an approximation.
    one = tl.full((M, N // 16), 1.0, tl.float32)
    encode = tl.where(decoded == 0, 0.0, tl.div_rn(one, decoded * tl.div_rn(one, one * multiplier)))
    scaled = (blocks * encode[:, :, None]).reshape(M, N)
    size = tl.abs(scaled)
    # A tie goes to the even code. The boundaries are counted from above, so that NaN gets the largest magnitude.
    code = 7 - (
        (size <= 0.25).to(tl.int32)
        + (size < 0.75).to(tl.int32)
        + (size <= 1.25).to(tl.int32)
        + (size < 1.75).to(tl.int32)
        + (size <= 2.5).to(tl.int32)
        + (size < 3.5).to(tl.int32)
        + (size <= 5.0).to(tl.int32)
    )
    code += tl.where(scaled.to(tl.int32, bitcast=True) < 0, 8, 0)
    low, high = tl.split(code.reshape(M, N // 2, 2))
    return (low | (high << 4)).to(tl.uint8), block_scale


@triton.jit
def _quantize_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    multiplier_ptr,
    packed_ptr,
    scale_ptr,
    rows,
    x_stride,
    COLUMNS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """Kernel of :func:`quantize`. Each program quantizes one tile [M, N]."""
    STRIPS: tl.constexpr = (COLUMNS + N - 1) // N
    row = (tl.program_id(0) // STRIPS).to(tl.int64) * M + tl.arange(0, M)
    strip = tl.program_id(0) % STRIPS
    column = strip * N + tl.arange(0, N)
    inside = (row < rows)[:, None]
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside & (column < COLUMNS)[None, :], other=0.0)
    packed, scale = _quantized(x.to(tl.float32), tl.load(multiplier_ptr))
    byte = strip * (N // 2) + tl.arange(0, N // 2)
    block = strip * (N // 16) + tl.arange(0, N // 16)
    inside_packed, inside_scale = inside & (byte < COLUMNS // 2)[None, :], inside & (block < COLUMNS // 16)[None, :]
    tl.store(packed_ptr + row[:, None] * (COLUMNS // 2) + byte[None, :], packed, mask=inside_packed)
    tl.store(scale_ptr + row[:, None] * (COLUMNS // 16) + block[None, :], scale, mask=inside_scale)


def quantize(x: torch.Tensor, multiplier: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a CUDA matrix to NVFP4 with the same bits as ``nvfp4.quantize``.

    The function allocates only the result and does not synchronize.

    :param x: float [M, K] with rows of consecutive elements, K a multiple of 16.
    :param multiplier: one float32 value.
    :returns: packed: uint8 [M, K // 2]; block_scale: float8_e4m3fn [M, K // 16].
    :raises ValueError: K is not a multiple of 16, or multiplier is more than one value.
    """
    rows, columns = x.shape
    if columns % BLOCK_SIZE:
        raise ValueError(f"NVFP4 needs a last dimension that is a multiple of {BLOCK_SIZE}, got {columns}")
    if not isinstance(multiplier, torch.Tensor):
        multiplier = torch.full((1,), multiplier, dtype=torch.float32, device=x.device)
    if multiplier.numel() != 1:
        raise ValueError(f"global_scale must be one value, got shape {tuple(multiplier.shape)}")
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, columns // BLOCK_SIZE, dtype=torch.float8_e4m3fn, device=x.device)
    if packed.numel():
        M, N = 16, 256
        multiplier = multiplier.to(device=x.device, dtype=torch.float32)
        grid = (triton.cdiv(rows, M) * triton.cdiv(columns, N),)
        _quantize_kernel[grid](x, multiplier, packed, scale, rows, x.stride(0), COLUMNS=columns, M=M, N=N)
    return packed, scale


@triton.jit
def _gemm1_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    x_scale_ptr,
    weights_ptr,
    scales_ptr,
    row_ptr,
    scale_row_ptr,
    gate_scale_ptr,
    up_scale_ptr,
    slot_ptr,
    block_expert_ptr,
    block_first_ptr,
    block_end_ptr,
    out_ptr,
    out_scale_ptr,
    experts,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Compute activation(x @ w13.T), quantized to NVFP4, for M (token, expert) pairs of one expert and N columns of the
    intermediate.
    """
    STRIPS: tl.constexpr = INTERMEDIATE // N
    block = tl.program_id(0) // STRIPS
    strip = tl.program_id(0) % STRIPS
    expert = tl.load(block_expert_ptr + block).to(tl.int64)
    if expert < experts:
        position = tl.load(block_first_ptr + block) + tl.arange(0, M)
        mine = position < tl.load(block_end_ptr + block)
        token = (tl.load(slot_ptr + position, mask=mine, other=0) // TOP_K).to(tl.int64)
        K_BYTES: tl.constexpr = HIDDEN // 2
        ROWS: tl.constexpr = INTERMEDIATE * (2 if GATED else 1)
        w = weights_ptr + expert * (ROWS * K_BYTES)
        s = scales_ptr + expert * (ROWS * (K_BYTES // 8))
        # The weight has up before gate.
        column = strip * N + tl.arange(0, N)
        up_row, up_scale_row = tl.load(row_ptr + column), tl.load(scale_row_ptr + column)
        up = tl.zeros((M, N), tl.float32)
        if GATED:
            gate_row = tl.load(row_ptr + INTERMEDIATE + column)
            gate_scale_row = tl.load(scale_row_ptr + INTERMEDIATE + column)
            gate = tl.zeros((M, N), tl.float32)
        for k in range(0, K_BYTES, BYTES):
            even, odd = _activations(x_ptr, x_scale_ptr, token, mine, k, K_BYTES, BYTES)
            up = _multiplied(even, odd, w, s, up_row, up_scale_row, k, K_BYTES, up, BYTES)
            if GATED:
                gate = _multiplied(even, odd, w, s, gate_row, gate_scale_row, k, K_BYTES, gate, BYTES)
        gate_scale, up_scale = tl.load(gate_scale_ptr + expert), tl.load(up_scale_ptr + expert)
        if GATED:
            gate = gate * gate_scale
            result = tl.div_rn(gate, 1.0 + tl.exp(-gate)) * (up * up_scale)
        else:
            positive = tl.maximum(up * gate_scale, 0.0)
            result = positive * positive * up_scale
        # The multiplier for the intermediate is in up_scale.
        packed, scale = _quantized(result, 1.0)
        to = position.to(tl.int64)[:, None]
        byte = strip * (N // 2) + tl.arange(0, N // 2)
        group = strip * (N // 16) + tl.arange(0, N // 16)
        tl.store(out_ptr + to * (INTERMEDIATE // 2) + byte[None, :], packed, mask=mine[:, None])
        tl.store(out_scale_ptr + to * (INTERMEDIATE // 16) + group[None, :], scale, mask=mine[:, None])


@triton.jit
def _gemm2_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    x_scale_ptr,
    weights_ptr,
    scales_ptr,
    row_ptr,
    scale_row_ptr,
    out_scale_ptr,
    slot_ptr,
    block_expert_ptr,
    block_first_ptr,
    block_end_ptr,
    out_ptr,
    experts,
    first_column,
    columns,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Compute x @ w2.T in float32, for M (token, expert) pairs of one expert and N columns from ``first_column`` on."""
    strips = columns // N
    block = tl.program_id(0) // strips
    strip = tl.program_id(0) % strips
    expert = tl.load(block_expert_ptr + block).to(tl.int64)
    if expert < experts:
        position = tl.load(block_first_ptr + block) + tl.arange(0, M)
        mine = position < tl.load(block_end_ptr + block)
        K_BYTES: tl.constexpr = INTERMEDIATE // 2
        w = weights_ptr + expert * (HIDDEN * K_BYTES)
        s = scales_ptr + expert * (HIDDEN * (K_BYTES // 8))
        column = strip * N + tl.arange(0, N)
        row, scale_row = tl.load(row_ptr + first_column + column), tl.load(scale_row_ptr + first_column + column)
        acc = tl.zeros((M, N), tl.float32)
        for k in range(0, K_BYTES, BYTES):
            even, odd = _activations(x_ptr, x_scale_ptr, position.to(tl.int64), mine, k, K_BYTES, BYTES)
            acc = _multiplied(even, odd, w, s, row, scale_row, k, K_BYTES, acc, BYTES)
        slot = tl.load(slot_ptr + position, mask=mine, other=0).to(tl.int64)
        acc = acc * tl.load(out_scale_ptr + expert)
        tl.store(out_ptr + slot[:, None] * columns + column[None, :], acc, mask=mine[:, None])


@triton.jit
def _sum_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, expert_ptr, weight_ptr, out_ptr, experts, columns, out_stride, TOP_K: tl.constexpr, N: tl.constexpr
):
    """Write out[token] = sum of weight * row over the token's experts, one expert after another."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * N + tl.arange(0, N)
    inside = column < columns
    total = tl.zeros((N,), tl.float32)
    for k in range(TOP_K):
        slot = token * TOP_K + k
        # Rows of slots whose expert is on another rank were never written.
        local = tl.load(expert_ptr + slot) < experts
        row = tl.load(rows_ptr + slot * columns + column, mask=inside & local, other=0.0)
        total += row * tl.load(weight_ptr + slot)
    tl.store(out_ptr + token * out_stride + column, total.to(tl.bfloat16), mask=inside)


def _blocks(expert: torch.Tensor, experts: int) -> tuple[torch.Tensor, ...]:
    """Sort the slots, which are (token, expert) pairs, by expert. Divide each expert's slots into blocks of at most
    ``_BLOCK_M`` slots. The number of blocks is the largest that any routing needs, so some blocks may be unused.

    :param expert: int64 [slots], the local expert of each slot, or ``experts`` if the slot's expert is on another rank.
    :param experts: number of local experts. The experts are numbered from 0, so this number belongs to no expert. It
        marks slots of other ranks' experts, and unused blocks.
    :returns: four int32 tensors:

        - the sorted slots, [slots]
        - expert of each block, [blocks]
        - position of the block's first slot among the sorted slots, [blocks]
        - position after the last slot of the block's expert, [blocks]
    """
    slots, device = expert.numel(), expert.device
    in_order, slot = expert.sort(stable=True)
    start = torch.searchsorted(in_order, torch.arange(experts + 1, device=device))
    blocks = (start.diff() + _BLOCK_M - 1) // _BLOCK_M
    block_stop = blocks.cumsum(0)
    # Each expert with a slot has at most one block that is not full.
    block = torch.arange(min(slots, experts) + slots // _BLOCK_M, device=device)
    block_expert = torch.searchsorted(block_stop, block, right=True)
    of = block_expert.clamp(max=experts - 1)
    block_first = start[of] + (block - (block_stop[of] - blocks[of])) * _BLOCK_M
    return tuple(t.int() for t in (slot, block_expert, block_first, start[of + 1]))


def run_experts(
    layer: _Layer,
    orders: tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    ids: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    scratch_bytes: int = SCRATCH_BYTES,
) -> None:
    """Compute the routed experts of an NVFP4 layer, like ``flashinfer_kernels.trtllm_fp4_block_scale_moe`` after its
    routing.

    :param orders: row orders of the first and of the second GEMM's weights. Each is a pair of int tensors [rows], for
        the FP4 codes and for the block scales. Element i is the position of row i in the TRT-LLM layout.
    :param ids: int64 [tokens, top_k], local expert numbers. Numbers outside 0 to experts - 1 contribute nothing.
    :param weights: float32 [tokens, top_k].
    :param output: bfloat16 [tokens, up to hidden], contiguous. It receives the result, and may not overlap an argument.
    :param scratch_bytes: limit of the scratch memory. At least 128 tokens and 64 columns are computed at a time, even
        if they need more.
    """
    tokens, top_k = ids.shape
    experts, hidden, intermediate = layer.local_num_experts, layer.hidden, layer.intermediate_size
    # The experts of a token are sorted by their numbers, so that the order in which they are passed does not change the
    # sum.
    expert = torch.where((ids >= 0) & (ids < experts), ids, experts)
    expert, order = expert.sort(dim=1, stable=True)
    weights = weights.gather(1, order).contiguous()
    x, x_scale = layer.hidden_states, layer.hidden_states_scale
    gemm1 = layer.gemm1_weights, layer.gemm1_weights_scale, *orders[0]
    gemm2 = layer.gemm2_weights, layer.gemm2_weights_scale, *orders[1]

    per_slot = intermediate // 2 + intermediate // BLOCK_SIZE
    step = max(128, scratch_bytes // (top_k * (per_slot + _BLOCK_N * 4)))
    most_columns = scratch_bytes - min(tokens, step) * top_k * per_slot
    most_columns = max(most_columns // (min(tokens, step) * top_k * 4) // _BLOCK_N, 1) * _BLOCK_N
    most_columns = min(most_columns, hidden)
    tile: dict[str, Any] = {"M": _BLOCK_M, "N": _BLOCK_N, "BYTES": _BLOCK_BYTES, "num_warps": 4}
    sizes = {"HIDDEN": hidden, "INTERMEDIATE": intermediate}

    def run_pass(here: slice) -> None:  # a function, so that its scratch memory is free before the next pass
        slots, device = expert[here].numel(), x.device
        slot, *blocks = _blocks(expert[here].flatten(), experts)
        count = blocks[0].numel()
        packed = torch.empty(slots, intermediate // 2, dtype=torch.uint8, device=device)
        scale = torch.empty(slots, intermediate // BLOCK_SIZE, dtype=torch.float8_e4m3fn, device=device)
        _gemm1_kernel[(count * (intermediate // _BLOCK_N),)](
            *(x[here], x_scale[here], *gemm1, layer.output1_scale_gate_scalar, layer.output1_scale_scalar),
            *(slot, *blocks, packed, scale, experts),
            **sizes,
            TOP_K=top_k,
            GATED=layer.gated,
            **tile,
        )
        rows = torch.empty(slots * most_columns, dtype=torch.float32, device=device)
        for first in range(0, output.shape[1], most_columns):
            columns = min(most_columns, hidden - first)
            _gemm2_kernel[(count * (columns // _BLOCK_N),)](
                *(packed, scale, *gemm2, layer.output2_scale_scalar),
                *(slot, *blocks, rows, experts, first, columns),
                **sizes,
                **tile,
            )
            strip = output[here, first : first + columns]
            _sum_kernel[(strip.shape[0], triton.cdiv(columns, 1024))](
                *(rows, expert[here], weights[here], strip, experts, columns, output.stride(0)), TOP_K=top_k, N=1024
            )

    for first in range(0, tokens, step):
        run_pass(slice(first, min(first + step, tokens)))


assert E4M3_MAX == 448.0  # spelled out in _quantized
