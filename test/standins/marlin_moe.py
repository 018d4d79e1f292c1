"""Stand-in in plain PyTorch for the engine's compiled kernel ``moe_wna16_marlin_gemm``, with the same signature.

It refuses the same arguments as the kernel. It reads weights, scales and biases at the kernel's addresses, in tiles of
16 x 64. The order of the columns within a tile is not the kernel's, which makes no difference to the tests.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

TILE_K, TILE_N = 16, 64
#: The number of columns must be a multiple of this, the width of the narrower one of the kernel's two shapes for many
#: tokens.
THREAD_N = 128
#: Stand-ins for the engine's weight types: 4-bit integers with a bias of 8, 8-bit integers with a bias of 128, 4-bit
#: floats.
INT4, INT8, FP4 = (
    SimpleNamespace(id=n, size_bits=bits, zero=zero) for n, bits, zero in ((0, 4, 8), (1, 8, 128), (2, 4, None))
)
#: Streaming multiprocessors of the simulated GPU.
SMS = 4
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def scalar_type(bits, zero_points, scales=None, global_scale=None):
    """Stand-in for the engine's ``get_scalar_type``. It returns ``INT4``, ``INT8`` or ``FP4``."""
    if bits == 8:
        return INT8
    return FP4 if scales is not None and scales.itemsize == 1 else INT4


def unpacked(packed, kind):
    """Return packed weights, [experts, k / 16, words], as float64 weights, [experts, k, n]."""
    experts, k_tiles, words = packed.shape
    columns = words * 32 // kind.size_bits // TILE_K
    shifts = torch.arange(0, 32, kind.size_bits, device=packed.device)
    values = (packed.unsqueeze(-1) >> shifts) & ((1 << kind.size_bits) - 1)
    values = values.view(experts, k_tiles, columns // TILE_N, TILE_K, TILE_N).transpose(2, 3)
    values = values.reshape(experts, TILE_K * k_tiles, columns)
    if kind.zero is None:
        return _E2M1.to(values.device)[values & 7].double() * (1 - 2 * (values >> 3))
    return (values - kind.zero).double()


def in_order(by_column):
    """Return scales or biases in the order of the columns, as float64. The argument has them in the order of the
    kernel's tiles."""
    return by_column.double().view(*by_column.shape[:-1], -1, TILE_N).flip(-1).reshape(by_column.shape)


def compiled(dtype, is_ep=None, has_bias=None, expert_ids_are_sorted=False, zero_inactive_output=False, *more):
    """Stand-in for the engine's ``_jit_moe_wna16_marlin_module``. It returns an object with the GEMM.

    The engine compiles one module for each combination of this function's arguments. Before 0.5.23, the function has
    only the argument ``dtype``.
    """
    types = {kind.id: kind for kind in (INT4, INT8, FP4)}

    def gemm(
        a,
        c,
        b_q_weight,
        b_bias,
        b_scales,
        global_scale,
        b_zeros,
        g_idx,
        perm,
        workspace,
        sorted_token_ids,
        expert_ids,
        num_tokens_post_padded,
        topk_weights,
        a_tmp,
        c_tmp,
        moe_block_size,
        top_k,
        mul_topk_weights,
        is_ep_,
        type_id,
        size_m,
        size_n,
        size_k,
        has_act_order,
        has_bias_,
        is_k_full,
        has_zp,
        num_groups,
        group_size,
        use_atomic_add,
        use_fp32_reduce,
        is_zp_float,
    ):
        kind = types[type_id]
        assert not has_act_order
        assert not has_zp
        assert is_ep in (None, is_ep_)
        assert has_bias in (None, has_bias_)
        for tensor in (b_q_weight, b_scales, b_bias, c):
            assert tensor.is_contiguous()
        assert a.shape == (size_m, size_k)
        assert c.shape == (size_m * top_k, size_n)
        assert size_n % THREAD_N == 0, f"no thread configuration for {size_n} columns"
        assert b_q_weight.shape[1:] == (size_k // TILE_K, size_n * TILE_K * kind.size_bits // 32)
        assert b_scales.shape[1:] == (num_groups, size_n)
        assert workspace.numel() >= min(size_n // 64 * (sorted_token_ids.numel() // moe_block_size), 4 * SMS)
        assert not workspace.any()
        weights = unpacked(b_q_weight, kind)
        weights *= in_order(b_scales.float()).repeat_interleave(size_k // num_groups, 1)
        if global_scale.numel():
            weights *= global_scale.double().view(-1, 1, 1)
        bias = in_order(b_bias.float()) if has_bias_ else None
        for block in range(int(num_tokens_post_padded[0]) // moe_block_size):
            rows = sorted_token_ids[block * moe_block_size : (block + 1) * moe_block_size].long()
            rows, expert = rows[rows < size_m * top_k], int(expert_ids[block])
            if expert < 0:
                assert is_ep_
                if zero_inactive_output:
                    c[rows] = 0
                continue
            values = a[rows // top_k].double() @ weights[expert]
            if bias is not None:
                values += bias[expert]
            if mul_topk_weights:
                values *= topk_weights.reshape(-1)[rows].double().unsqueeze(1)
            c[rows] = values.to(c.dtype)

    return SimpleNamespace(moe_wna16_marlin_gemm=gemm)
