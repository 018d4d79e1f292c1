"""Stand-ins in plain PyTorch for the CuteDSL NVFP4 MoE kernels that FlashInfer's ``CuteDslMoEWrapper`` calls.

The stand-ins (:data:`KERNELS`) have the signatures of the kernels. The wrapper is the installed FlashInfer's. It zeroes
the output on a second CUDA stream. Without a GPU, :data:`ON_ONE_STREAM` lets it run without this stream.

Before FlashInfer 0.6.14 the wrapper has buffers for a limited number of tokens. The stand-ins use these buffers as the
real kernels do, so a test fails if a buffer is too small or shared at the wrong time, or if the output is not zeroed.
Like the real kernels, the stand-ins do not write the unused rows at the end of a tile.

Sums are exact in float64, and a token's experts are added in the order of their numbers, as in
:mod:`~sglang_moe_reference.flashinfer_kernels`. The stand-in for the second kernel rounds the sum once, to the output's
dtype. The real second kernel adds the experts with bfloat16 atomics, in any order.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from sglang_moe_patches.core.engine import has_module

from sglang_moe_reference import nvfp4
from sglang_moe_reference.flashinfer_kernels import (
    ACTIVATION_SWIGLU,
    load_weights,
    nvfp4_block_scale_interleave,
    undo_block_scale_interleave,
)

W13_GROUP = 64
"""Number of rows in a group. In the first weight, groups of the up and of the gate projection alternate: up 0-63, gate
0-63, up 64-127, ..."""

_TILE_ROWS, _TILE_COLS = 128, 4
_ONLY = {
    **dict.fromkeys(("ab_dtype", "a_dtype", "b_dtype"), "float4_e2m1fn"),
    "sf_dtype": "float8_e4m3fn",
    "sf_vec_size": nvfp4.BLOCK_SIZE,
    "quantize_output": True,
    "gated": True,
    "activation_type": ACTIVATION_SWIGLU,
    "swiglu_alpha": 1.0,
    "swiglu_beta": 0.0,
    "swiglu_limit": torch.finfo(torch.float32).max,
    **dict.fromkeys(("situ_beta", "situ_linear_beta", "a_per_token_scale"), None),
}
"""Supported values of options that change the results of the matrix products. With these values, the data are NVFP4 and
the activation is plain SwiGLU."""


def moe_sort(
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor,
    num_experts: int,
    top_k: int,
    local_expert_offset: int = 0,
    num_local_experts: int | None = None,
    tile_tokens_dim: int = 128,
    enable_pdl: bool = False,
    out_tile_idx_to_expert_idx: torch.Tensor | None = None,
    out_tile_idx_to_mn_limit: torch.Tensor | None = None,
    out_expanded_idx_to_permuted_idx: torch.Tensor | None = None,
    out_permuted_idx_to_expanded_idx: torch.Tensor | None = None,
    out_total_num_padded_tokens: torch.Tensor | None = None,
    out_num_non_exiting_tiles: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Stand-in for FlashInfer's ``moe_sort``: sort (token, expert) pairs by their local experts.

    The sorted pairs are the rows of the MoE kernels. ``tile_tokens_dim`` rows are a tile, and the pairs of each expert
    begin in a new tile. The pair of a token and its ``slot``-th expert has the number ``token * top_k + slot``.

    :param token_selected_experts: int [tokens, top_k], expert ids of the whole layer. Experts on other ranks are left
        out.
    :param out_*: int32 buffers for the results. ``None``: the buffer is allocated by FlashInfer's
        ``allocate_moe_sort_buffers``. A larger buffer is allowed; only the used part is written.
    :returns: six int32 tensors:

        - local expert of each tile, [tiles]
        - row after the last row of each tile, [tiles]
        - row of each pair, [tokens, top_k]; -1 if the expert is on another rank
        - number of the pair in each row, [rows]
        - number of used rows, [1]
        - number of used tiles, [1]
    """
    from flashinfer.fused_moe.cute_dsl.moe_utils import allocate_moe_sort_buffers

    tokens, device = token_selected_experts.shape[0], token_selected_experts.device
    experts = num_local_experts or num_experts
    own = allocate_moe_sort_buffers(tokens, num_experts, top_k, experts, tile_tokens_dim, device)
    given = {
        "out_tile_idx_to_expert_idx": out_tile_idx_to_expert_idx,
        "out_tile_idx_to_mn_limit": out_tile_idx_to_mn_limit,
        "out_expanded_idx_to_permuted_idx": out_expanded_idx_to_permuted_idx,
        "out_permuted_idx_to_expanded_idx": out_permuted_idx_to_expanded_idx,
        "out_total_num_padded_tokens": out_total_num_padded_tokens,
        "out_num_non_exiting_tiles": out_num_non_exiting_tiles,
    }
    result = [own[name] if tensor is None else tensor for name, tensor in given.items()]

    expert_of = token_selected_experts.flatten().long() - local_expert_offset
    local = (expert_of >= 0) & (expert_of < experts)
    pair = local.nonzero().flatten()
    pair = pair[expert_of[pair].argsort(stable=True)]
    expert_of = expert_of[pair]
    counts = torch.bincount(expert_of, minlength=experts)
    tiles = (counts + tile_tokens_dim - 1) // tile_tokens_dim
    first_tile = tiles.cumsum(0) - tiles
    first_pair = counts.cumsum(0) - counts
    row = first_tile[expert_of] * tile_tokens_dim + torch.arange(len(pair), device=device) - first_pair[expert_of]

    expert = torch.repeat_interleave(torch.arange(experts, device=device), tiles)
    tile_end = (torch.arange(len(expert), device=device) + 1) * tile_tokens_dim
    limit = torch.minimum(tile_end, first_tile[expert] * tile_tokens_dim + counts[expert])
    position = torch.full_like(local, -1, dtype=torch.int32)
    position[pair] = row.int()

    result[0][: len(expert)] = expert.int()
    result[1][: len(expert)] = limit.int()
    result[2].view(-1)[: len(position)] = position
    result[3][row] = pair.int()
    result[4].fill_(len(expert) * tile_tokens_dim)
    result[5].fill_(len(expert))
    return tuple(result)


def gather_gemm_swiglu(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor,
    tile_idx_to_expert_idx: torch.Tensor,
    tile_idx_to_mn_limit: torch.Tensor,
    token_id_mapping: torch.Tensor,
    num_non_exiting_tiles: torch.Tensor,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    *,
    topk: int = 8,
    c_dtype: str = "bfloat16",
    mma_tiler_mn: tuple[int, int] = (256, 128),
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand-in for ``blockscaled_contiguous_gather_grouped_gemm_swiglu_fusion_nvfp4``, with NVFP4 output only.

    In later FlashInfer releases, this function is ``..._act_fusion(_nvfp4)`` with SwiGLU as activation.

    out[row] = nvfp4(up * silu(gate)) with up, gate = alpha[expert] * (a[token of row] @ b[expert].T).

    :param a: uint8 [tokens, hidden // 2], NVFP4. a_scale: [tokens, hidden // 16] E4M3 bytes, linear.
    :param b: uint8 [local experts, 2 * intermediate, hidden // 2]; up and gate alternate every 64 rows.
    :param b_scale: E4M3 bytes in the MMA layout. The stand-in reads the memory in its order: [experts, row tiles,
        column tiles, 32, 4, 4].
    :param alpha: float32 [local experts].
    :param token_id_mapping: number of the (token, expert) pair of each row, int32 [rows] (:func:`moe_sort`).
    :param out: uint8 [rows, intermediate // 2]. out_scale: uint8 with rows * intermediate // 16 elements, interleaved.
    :param global_scale: float32 [1], multiplier for the intermediate.
    :param mma_tiler_mn: number of rows of a tile, and a number that only tunes the real kernel.
    :param options: tuning options, which have no effect here, and options that must have the values of ``_ONLY``.
    :returns: out and out_scale. Each is allocated if the caller passes ``None``.
    :raises NotImplementedError: an argument is not supported. The message names the argument.
    :raises ValueError: the shapes do not fit together.
    """
    _require_supported(options)
    if c_dtype != "float4_e2m1fn" or global_scale is None:
        raise NotImplementedError(f"c_dtype={c_dtype!r}: only 'float4_e2m1fn', with a global_scale")
    experts, rows, intermediate = b.shape[0], token_id_mapping.shape[0], b.shape[1] // 2
    if b.shape[1] % (2 * W13_GROUP):
        raise ValueError(f"b must have a multiple of {2 * W13_GROUP} rows, got {b.shape[1]}")
    if a.shape[1] != b.shape[2]:
        raise ValueError(f"a and b must have the same last dimension, got {list(a.shape)} and {list(b.shape)}")
    columns = intermediate // nvfp4.BLOCK_SIZE
    if out is None:
        out = torch.empty(rows, intermediate // 2, dtype=torch.uint8, device=a.device)
    if out_scale is None:
        out_scale = torch.empty(rows * columns, dtype=torch.uint8, device=a.device)
    x = nvfp4.decode(a, a_scale.view(torch.float8_e4m3fn).reshape(len(a), a.shape[1] * 2 // nvfp4.BLOCK_SIZE)).double()
    tiles = tile_idx_to_expert_idx, tile_idx_to_mn_limit, num_non_exiting_tiles
    for expert, start, stop in _runs(*tiles, mma_tiler_mn[0]):
        token = token_id_mapping[start:stop].long() // topk
        gemm = (x[token] @ _weight(b, b_scale, expert, experts).T) * alpha[expert].double()
        up, gate = (half.flatten(-2) for half in gemm.unflatten(-1, (-1, 2, W13_GROUP)).unbind(-2))
        packed, scale = nvfp4.quantize(up * F.silu(gate), global_scale)
        out[start:stop] = packed
        interleaved = nvfp4_block_scale_interleave(scale.view(torch.uint8))
        _memory(out_scale)[start * columns : start * columns + len(interleaved)] = interleaved
    return out, out_scale


def gemm_finalize(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor,
    tile_idx_to_expert_idx: torch.Tensor,
    num_non_exiting_tiles: torch.Tensor,
    tile_idx_to_mn_limit: torch.Tensor,
    permuted_idx_to_expanded_idx: torch.Tensor,
    token_final_scales: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    out_dtype: str = "bfloat16",
    mma_tiler_mn: tuple[int, int] = (256, 128),
    use_fused_finalize: bool = True,
    **options: Any,
) -> torch.Tensor:
    """Stand-in for ``blockscaled_contiguous_grouped_gemm_finalize_fusion(_nvfp4)``.

    out[token of row] += alpha[expert] * (a[row] @ b[expert].T) * token_final_scales[pair of row].

    :param a, a_scale: results of ``gather_gemm_swiglu``.
    :param b: uint8 [local experts, hidden, intermediate // 2]. b_scale: in the layout of ``gather_gemm_swiglu``.
    :param token_final_scales: routing weights, float [tokens, top_k].
    :param out: bfloat16 [tokens, hidden], contiguous. The result is added to it, so the caller must zero it. None: a
        zeroed tensor is allocated.
    :param use_fused_finalize: if false, ``out`` is [tokens * top_k, hidden] and receives one row for each (token,
        expert) pair. ``unpermute`` then multiplies the rows by their routing weights, and adds them.
    :raises NotImplementedError: an argument is not supported. The message names the argument.
    :raises ValueError: the shapes do not fit together.
    """
    _require_supported(options)
    if out_dtype != "bfloat16":
        raise NotImplementedError(f"out_dtype={out_dtype!r}: only 'bfloat16'")
    experts, hidden, half = b.shape
    tokens, topk = token_final_scales.shape
    shape = (tokens if use_fused_finalize else tokens * topk, hidden)
    if out is None:
        out = torch.zeros(shape, dtype=torch.bfloat16, device=a.device)
    # The real kernel uses only the address and does not check shape and strides.
    if out.shape != shape or out.dtype != torch.bfloat16 or not out.is_contiguous():
        raise ValueError(f"out must be contiguous bfloat16 {list(shape)}, got {out.dtype} {list(out.shape)}")
    columns = half * 2 // nvfp4.BLOCK_SIZE
    total = out.float()
    tiles = tile_idx_to_expert_idx, tile_idx_to_mn_limit, num_non_exiting_tiles
    for expert, start, stop in _runs(*tiles, mma_tiler_mn[0]):
        pair = permuted_idx_to_expanded_idx[start:stop].long()
        padded = stop - start + -(stop - start) % _TILE_ROWS
        scale = _memory(a_scale)[start * columns : (start + padded) * columns]
        linear = undo_block_scale_interleave(scale, padded, columns)[: stop - start]
        intermediate = nvfp4.decode(a[start:stop], linear.view(torch.float8_e4m3fn)).double()
        y = ((intermediate @ _weight(b, b_scale, expert, experts).T) * alpha[expert].double()).float()
        if not use_fused_finalize:
            out[pair] = y.to(out.dtype)
            continue
        weight = token_final_scales[pair // topk, pair % topk].float()
        total.index_add_(0, pair // topk, y * weight.unsqueeze(-1))
    return out.copy_(total) if use_fused_finalize else out


def unpermute(
    permuted_input: torch.Tensor,
    output: torch.Tensor,
    expanded_idx_to_permuted_idx: torch.Tensor,
    topk_scales: torch.Tensor,
    num_tokens: int,
    top_k: int,
    enable_pdl: bool = False,
    input_is_expanded: bool = False,
) -> None:
    """Stand-in for ``moe_unpermute``: output[token] = sum of scale * row over the token's experts, in float32.

    :param permuted_input: bfloat16 [pairs, hidden], a row for each (token, expert) pair. Rows of other ranks' experts
        are not read.
    :param expanded_idx_to_permuted_idx: int32 [tokens, top_k], negative for other ranks' experts.
    :raises NotImplementedError: the rows are in the order of the experts.
    """
    if not input_is_expanded:
        raise NotImplementedError("input_is_expanded=False: only True")
    total = torch.zeros(num_tokens, output.shape[1], device=output.device)
    rows = permuted_input[: num_tokens * top_k].view(num_tokens, top_k, -1)
    for slot in range(top_k):
        local = expanded_idx_to_permuted_idx[:num_tokens, slot] >= 0
        total[local] += rows[local, slot].float() * topk_scales[:num_tokens][local, slot, None].float()
    output[:num_tokens] = total.to(output.dtype)


def zero(output: torch.Tensor) -> None:
    """Stand-in for ``moe_output_memset_inplace``: fill the output with zeros."""
    output.zero_()


def _require_supported(options: dict[str, Any]) -> None:
    for name, value in _ONLY.items():
        given = options.get(name, value)
        if given is not value and given != value:
            raise NotImplementedError(f"{name}={given!r}: only {value!r}")


def _runs(
    tile_to_expert: torch.Tensor, tile_to_limit: torch.Tensor, num_tiles: torch.Tensor, tile_rows: int
) -> Iterator[tuple[int, int, int]]:
    """Yield three numbers for each expert with tokens: the local expert, its first row, and the row after its last
    row.
    """
    n = int(num_tiles)
    tiles = zip(range(n), tile_to_expert[:n].tolist(), tile_to_limit[:n].tolist(), strict=True)
    for expert, group in groupby(tiles, key=lambda tile: tile[1]):
        own = list(group)
        yield expert, own[0][0] * tile_rows, own[-1][2]


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in memory order, whatever its shape and strides are. The real kernels read from the
    tensor's address, too.
    """
    return tensor.view(torch.uint8).as_strided((tensor.numel(),), (1,))


def _weight(packed: torch.Tensor, scale: torch.Tensor, expert: int, experts: int) -> torch.Tensor:
    """Return one expert's weight as float64 [rows, K], without the whole-tensor scale."""
    rows, columns = packed.shape[1], packed.shape[2] * 2 // nvfp4.BLOCK_SIZE
    if rows % _TILE_ROWS or columns % _TILE_COLS or scale.numel() != experts * rows * columns:
        raise ValueError(
            f"weights {list(packed.shape)} must have a multiple of {_TILE_ROWS} rows, of {_TILE_COLS * 16} columns and "
            f"a block scale for each 16, got {scale.numel()} block scales"
        )
    return load_weights(packed[expert], _memory(scale)[expert * rows * columns :][: rows * columns])


# --- Below FlashInfer's wrapper ---------------------------------------------------------------------------------------


def _without_streams(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap ``CuteDslMoEWrapper.__init__``: create all buffers, but no CUDA stream and no events."""

    def nothing(*args: Any, **kwargs: Any) -> None: ...

    with mock.patch.multiple(torch.cuda, Stream=nothing, Event=nothing):
        original(self, *args, **kwargs)


def _zero_in_line(original: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Wrap ``_moe_core_impl``: zero the output between the two products instead of on a second stream."""
    return original(*args, **{**kwargs, "use_async_memset": False})


_PACKAGE = "flashinfer.fused_moe.cute_dsl"
INIT = f"{_PACKAGE}.fused_moe.CuteDslMoEWrapper.__init__"

KERNELS: dict[str, Callable[..., Any]] = {
    "fused_moe.moe_sort": moe_sort,
    "fused_moe.moe_output_memset_inplace": zero,  # before 0.6.12, PyTorch's own zero_
    "fused_moe.blockscaled_contiguous_gather_grouped_gemm_swiglu_fusion_nvfp4": gather_gemm_swiglu,
    "fused_moe.blockscaled_contiguous_gather_grouped_gemm_act_fusion_nvfp4": gather_gemm_swiglu,  # from 0.6.14
    "fused_moe.blockscaled_contiguous_gather_grouped_gemm_act_fusion": gather_gemm_swiglu,  # from 0.7.1
    "fused_moe.blockscaled_contiguous_grouped_gemm_finalize_fusion_nvfp4": gemm_finalize,
    "fused_moe.blockscaled_contiguous_grouped_gemm_finalize_fusion": gemm_finalize,  # from 0.7.1
    "fused_moe.moe_unpermute": unpermute,  # from 0.6.17
    "blackwell.moe_finalize.moe_unpermute": unpermute,  # from 0.7.2
}
"""Stand-ins for kernels, by the names under which the wrapper calls the kernels. The names differ between FlashInfer's
releases."""

ON_ONE_STREAM: dict[str, Callable[..., Any]] = {
    INIT: _without_streams,
    f"{_PACKAGE}.fused_moe._moe_core_impl": _zero_in_line,
}
"""Wrappers that let FlashInfer's code run without a second CUDA stream, for machines without a GPU. Each wrapper is
called with the original function and its arguments."""


def kernels() -> dict[str, Callable[..., Any]]:
    """Return the stand-ins for the kernels that the installed FlashInfer has, by the kernels' dotted names."""

    def is_there(module: str, name: str) -> bool:
        return has_module(module) and hasattr(importlib.import_module(module), name)

    targets = {f"{_PACKAGE}.{name}": kernel for name, kernel in KERNELS.items()}
    return {target: kernel for target, kernel in targets.items() if is_there(*target.rsplit(".", 1))}
