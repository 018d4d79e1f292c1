"""Stand-ins in plain PyTorch for FlashInfer's NVFP4 kernels, with the same signatures.

The stand-ins read weights in the layout of the real kernels: the rows are permuted for the tensor cores, and the block
scales are interleaved, too. Weights that are prepared incorrectly therefore give wrong answers, as on the hardware. For
an unsupported argument, a stand-in raises an exception that names the argument.

**A token's result has the same bits, whatever the rest of the batch is.**

- A sum of up to 1,188 products is exact in float64, so the order of its additions has no effect. Each factor is an
  NVFP4 value without its whole-tensor scale: a multiple of 2**-10, and at most 2688. The sum is therefore a multiple of
  2**-20 below 2**33, and fits in the 53 bits of a float64.
- A sum of more products is rounded only if it exceeds 2**33. The next step converts the sum to float32, which almost
  always removes the difference.
- The activation is computed in float64, too.
- The experts of a token are added in the order of their numbers.

The real kernels round in another way: they accumulate in float32, use approximate reciprocals, and round each expert's
output to bfloat16 before the weighted sum.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import cache, wraps
from importlib import util
from typing import Any

import torch
import torch.nn.functional as F

from sglang_moe_reference import nvfp4
from sglang_moe_reference.environment import WORKSPACE_MB

# FlashInfer's enum values (flashinfer.tllm_enums), spelled out so that importing this module does not import it.
ROUTING_DEFAULT, ROUTING_RENORMALIZE, ROUTING_DEEPSEEK_V3, ROUTING_LLAMA4, ROUTING_RENORMALIZE_NAIVE = range(5)
ROUTING_SIGMOID_RENORM, ROUTING_MINIMAX2, ROUTING_SIGMOID = 6, 7, 8
ACTIVATION_SWIGLU, ACTIVATION_RELU2 = 3, 6
SF_SWIZZLED, SF_LINEAR = 0, 2  # SfLayout.layout_128x4 and layout_linear

# Tile size for which the engine and FlashInfer shuffle the rows. Neither of them has an option for it.
_EPILOGUE_TILE_M = 128

# Block scales are interleaved in tiles of 128 rows by 4 columns: within a tile, rows 32 apart are neighbours.
_TILE_ROWS, _TILE_COLS = 128, 4


_TUNING = ("enable_pdl", "tune_max_num_tokens")
"""Arguments that only tune the real kernels. They have no effect here."""


def _at_the_signature_of(target: str, *, served: Iterable[str] = (), ignored: Iterable[str] = ()) -> Callable[..., Any]:
    """Give a stand-in the signature of ``target``, a function of the installed FlashInfer release.

    The stand-in's own function receives the arguments that it has as named parameters.

    :param served: names of further arguments that the function receives, by ``**kwargs``.
    :param ignored: names of arguments that the function does not receive, whatever their value is. The arguments in
        :data:`_TUNING` are ignored, too.
    :raises NotImplementedError: a call has another argument, and its value is neither ``None`` nor FlashInfer's
        default.
    """

    def stand_in(function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(function).parameters.values()
        taken = {*served, *(each.name for each in parameters if each.kind is not each.VAR_KEYWORD)}

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            signature = _signature_of(target)
            given = signature.bind(*args, **kwargs).arguments
            for name in given.keys() - taken - {*ignored, *_TUNING}:
                value, default = given[name], signature.parameters[name].default
                if not (value is None or value is default or (type(value) is type(default) and value == default)):
                    raise NotImplementedError(f"{name}={value!r}: only the default")
            return function(**{name: given[name] for name in taken & given.keys()})

        return call

    return stand_in


@cache
def _signature_of(target: str) -> inspect.Signature:
    # This must hold after the replacement, too: the engine's wrapper around a stand-in keeps the signature of the
    # original.
    return inspect.signature(pkgutil.resolve_name(target))


@_at_the_signature_of("flashinfer.fp4_quantize")
def fp4_quantize(
    input: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    is_sf_swizzled_layout: bool = True,
    is_global_scale_inversed: bool = False,
    backend: str = "cuda",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand-in for ``flashinfer.fp4_quantize``, for NVFP4 only.

    :param input: bfloat16 or float16 [M, K], row-major, K a multiple of 16.
    :param global_scale: one float32 value, the multiplier 448 * 6 / amax; None is 1.
    :param is_sf_swizzled_layout: interleave the scales (see ``nvfp4_block_scale_interleave``).
    :param is_global_scale_inversed: ``global_scale`` is amax / (448 * 6) instead.
    :returns: packed: uint8 [M, K // 2], first element in the low nibble. scales: the bytes of the E4M3 block scales as
        uint8, [M, K // 16] linear, or swizzled with M rounded up to a multiple of 128 and K // 16 to a multiple of 4.
    """
    if backend not in ("cuda", "cute-dsl"):  # two implementations of one function; the engine may request either
        raise NotImplementedError(f"backend={backend!r}: only 'cuda' and 'cute-dsl'")
    if input.dtype not in (torch.bfloat16, torch.float16) or input.dim() != 2 or input.stride(-1) != 1:
        raise NotImplementedError(f"input: only a row-major matrix of bfloat16 or float16, got {_describe(input)}")
    multiplier: torch.Tensor | float = 1.0 if global_scale is None else global_scale
    quantize = _triton().quantize if input.is_cuda and _triton() else nvfp4.quantize
    packed, block_scale = quantize(input, 1 / multiplier if is_global_scale_inversed else multiplier)
    return packed, _scale_bytes(block_scale, is_sf_swizzled_layout)


@_at_the_signature_of("flashinfer.nvfp4_quantize")
def nvfp4_quantize(
    a: torch.Tensor,
    a_global_sf: torch.Tensor,
    sfLayout: int = SF_SWIZZLED,
    backend: str = "cuda",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand-in for ``flashinfer.nvfp4_quantize``: :func:`fp4_quantize` with other argument names.

    :param a_global_sf: the multiplier.
    :param sfLayout: 0 swizzled or 2 linear block scales.
    :returns: the packed values and the scales, as ``fp4_quantize`` returns them.
    """
    if sfLayout not in (SF_SWIZZLED, SF_LINEAR):
        raise NotImplementedError(f"sfLayout={sfLayout!r}: only the linear and the 128x4 layouts")
    quantized: tuple[torch.Tensor, torch.Tensor] = fp4_quantize(
        a, a_global_sf, is_sf_swizzled_layout=sfLayout == SF_SWIZZLED, backend=backend
    )
    return quantized


def _scale_bytes(block_scale: torch.Tensor, swizzled: bool) -> torch.Tensor:
    """Return E4M3 block scales in FlashInfer's format: uint8, linear or swizzled."""
    scales = block_scale.view(torch.uint8)
    columns = scales.shape[-1]
    return nvfp4_block_scale_interleave(scales).view(-1, columns + -columns % _TILE_COLS) if swizzled else scales


def nvfp4_block_scale_interleave(unswizzled_sf: torch.Tensor) -> torch.Tensor:
    """Stand-in for ``flashinfer.nvfp4_block_scale_interleave`` (``block_scale_interleave``).

    The byte at row r, column c goes to tile (r // 128, c // 4), and in it to (r % 32, r % 128 // 32, c % 4).

    :param unswizzled_sf: uint8 [M, K] or [B, M, K].
    :returns: flat uint8 tensor. It has B * M' * K' bytes, with M rounded up to a multiple of 128 and K to a multiple of
        4. The padding is zero.
    """
    if unswizzled_sf.dtype != torch.uint8:
        raise NotImplementedError(f"unswizzled_sf of {unswizzled_sf.dtype}: only uint8")
    if unswizzled_sf.dim() not in (2, 3):
        raise ValueError(f"unswizzled_sf must have 2 or 3 dimensions, got shape {tuple(unswizzled_sf.shape)}")
    rows, cols = unswizzled_sf.shape[-2:]
    padded = F.pad(unswizzled_sf, (0, -cols % _TILE_COLS, 0, -rows % _TILE_ROWS))
    rows, cols = padded.shape[-2:]
    tiles = padded.reshape(-1, rows // _TILE_ROWS, 4, _TILE_ROWS // 4, cols // _TILE_COLS, _TILE_COLS)
    return tiles.transpose(2, 4).flatten()


def undo_block_scale_interleave(interleaved: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Undo ``nvfp4_block_scale_interleave`` for one matrix without padding. Return uint8 [rows, cols]."""
    tiles = interleaved.view(torch.uint8).reshape(
        rows // _TILE_ROWS, cols // _TILE_COLS, _TILE_ROWS // 4, 4, _TILE_COLS
    )
    return tiles.transpose(1, 3).reshape(rows, cols)


@dataclass(frozen=True)
class _Layer:
    """Weights of an NVFP4 layer and the layer's input. The fields have the names of FlashInfer's arguments.

    :param hidden_states: uint8 [tokens, hidden // 2], NVFP4.
    :param hidden_states_scale: float8_e4m3fn [tokens, hidden // 16], linear layout.
    :param gemm1_weights: uint8 [local experts, 2 * intermediate (gated) or intermediate, hidden // 2], NVFP4 with
        shuffled rows; up (w3) before gate (w1) before the shuffle.
    :param gemm1_weights_scale: float8_e4m3fn [local experts, rows, hidden // 16], shuffled and interleaved.
    :param gemm2_weights: uint8 [local experts, hidden, intermediate // 2], shuffled.
    :param gemm2_weights_scale: float8_e4m3fn [local experts, hidden, intermediate // 16], shuffled and interleaved.
    :param output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar: float32 [local experts].
    :param activation_type: FlashInfer's number: 3 SwiGLU or 6 ReLU^2 (not gated).
    """

    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor
    gemm1_weights: torch.Tensor
    gemm1_weights_scale: torch.Tensor
    gemm2_weights: torch.Tensor
    gemm2_weights_scale: torch.Tensor
    output1_scale_scalar: torch.Tensor
    output1_scale_gate_scalar: torch.Tensor
    output2_scale_scalar: torch.Tensor
    intermediate_size: int
    local_num_experts: int
    activation_type: int = ACTIVATION_SWIGLU

    def __post_init__(self) -> None:
        if self.hidden_states.dtype != torch.uint8:
            raise NotImplementedError(f"hidden_states of {self.hidden_states.dtype}: only NVFP4 packed in uint8")
        if self.activation_type not in (ACTIVATION_SWIGLU, ACTIVATION_RELU2):
            raise NotImplementedError(f"activation_type={self.activation_type}: only SwiGLU and ReLU^2")
        experts, hidden, rows = self.local_num_experts, self.hidden, self.rows
        shapes = {
            "gemm1_weights": (experts, rows, hidden // 2),
            "gemm1_weights_scale": (experts, rows, hidden // nvfp4.BLOCK_SIZE),
            "gemm2_weights": (experts, hidden, self.intermediate_size // 2),
            "gemm2_weights_scale": (experts, hidden, self.intermediate_size // nvfp4.BLOCK_SIZE),
            **dict.fromkeys(("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar"), (experts,)),
        }
        for name, shape in shapes.items():
            _check_shape(name, getattr(self, name), shape)

    @property
    def gated(self) -> bool:
        return self.activation_type == ACTIVATION_SWIGLU

    @property
    def hidden(self) -> int:
        return self.hidden_states.shape[1] * 2

    @property
    def rows(self) -> int:
        """Number of rows of an expert's first weight."""
        return self.intermediate_size * (2 if self.gated else 1)

    @property
    def has_triton_kernels(self) -> bool:
        return self.hidden_states.is_cuda

    def activate(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """Compute the activation between the two matrix products.

        Not gated: relu(x * gate_scale)^2 * scale. Gated, with x = [up, gate]: silu(gate * gate_scale) * up * scale.

        :param x: rows of the first product, float64 [rows, intermediate], or [rows, 2 * intermediate] if gated.
        :returns: float64 [rows, intermediate].
        """
        gate_scale, scale = (s[expert].double() for s in (self.output1_scale_gate_scalar, self.output1_scale_scalar))
        if not self.gated:
            return F.relu(x * gate_scale).square() * scale
        up, gate = x.chunk(2, dim=-1)
        return F.silu(gate * gate_scale) * (up * scale)


_OF_LAYER = tuple(each.name for each in fields(_Layer))
_ROUTING = ("routing_bias", "n_group", "topk_group", "routed_scaling_factor", "routing_method_type")


@_at_the_signature_of(
    "flashinfer.fused_moe.trtllm_fp4_block_scale_routed_moe", served=_OF_LAYER, ignored=("num_experts", *_ROUTING)
)
def trtllm_fp4_block_scale_routed_moe(
    topk_ids: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    top_k: int,
    local_expert_offset: int,
    do_finalize: bool = True,
    output: torch.Tensor | None = None,
    **layer: Any,
) -> list[torch.Tensor]:
    """Stand-in for the NVFP4 MoE kernel that receives the routing from its caller.

    :param topk_ids: int32 [tokens, top_k], global expert id << 16 | the bits of the bfloat16 routing weight. Newer
        releases pass a tuple instead: ids int [tokens, top_k], and weights bfloat16 or float32 [tokens, top_k]. An id
        that does not belong to a local expert contributes nothing.
    :returns: as ``trtllm_fp4_block_scale_moe``. If ``do_finalize`` is false and ``topk_ids`` is a tuple, expert_weights
        are the weights of the tuple.
    """
    if isinstance(topk_ids, torch.Tensor):
        ids, weights = _unpack_topk(topk_ids)
        weights = weights.bfloat16()
    else:
        ids, weights = topk_ids
        if weights.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"weights of topk_ids must be bfloat16 or float32, got {weights.dtype}")
    for part in (ids, weights):
        _check_shape("topk_ids", part, (layer["hidden_states"].shape[0], top_k))
    return _answer(_Layer(**layer), ids.long() - local_expert_offset, weights, output, do_finalize=do_finalize)


@_at_the_signature_of("flashinfer.fused_moe.trtllm_fp4_block_scale_moe", served=_OF_LAYER)
def trtllm_fp4_block_scale_moe(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor | None,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    local_expert_offset: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = ROUTING_DEFAULT,
    do_finalize: bool = True,
    output: torch.Tensor | None = None,
    **layer: Any,
) -> list[torch.Tensor]:
    """Stand-in for the NVFP4 MoE kernel that computes the routing itself.

    The activation of hidden_states @ gemm1_weights is quantized to NVFP4. Its multiplier is part of
    output1_scale_scalar. The activation is multiplied with gemm2_weights and output2_scale_scalar. The results of a
    token's experts are summed with the routing weights.

    :param routing_logits: float [tokens, num_experts].
    :param routing_bias: float [num_experts], added to the scores for the choice of experts only (DeepSeekV3, MiniMax2).
    :param num_experts: number of experts of the whole layer. This rank has ``local_num_experts`` of them, beginning
        with ``local_expert_offset``. The other experts contribute nothing.
    :param n_group, topk_group: DeepSeekV3 routing limited to the best groups of experts; None, 0 or 1 groups: no limit.
    :param routed_scaling_factor: factor of the routing weights, in DeepSeekV3 routing only; None is 1.
    :param routing_method_type: FlashInfer's number: 0 Default, 1 Renormalize, 2 DeepSeekV3, 3 Llama4, 4
        RenormalizeNaive, 6 SigmoidRenorm, 7 MiniMax2 or 8 Sigmoid.
    :param do_finalize: if false, the caller sums over the experts.
    :param output: bfloat16 [tokens, up to hidden], contiguous: it is written and returned. None: a tensor is allocated.
        Ignored if ``do_finalize`` is false.
    :param layer: see :class:`_Layer`.
    :returns: [output], bfloat16 [tokens, hidden]. If ``do_finalize`` is false, three tensors:

        - gemm2_output, bfloat16 [tokens * top_k, hidden]: one row for each (token, slot), sorted by expert. The real
          kernel returns more rows, because it pads each expert's rows to tiles.
        - expert_weights, bfloat16 [tokens, top_k].
        - expanded_idx_to_permuted_idx, int32 [tokens * top_k]: the row of each (token, slot); -1 if its expert is on
          another rank.
    """
    _check_shape("routing_logits", routing_logits, (layer["hidden_states"].shape[0], num_experts))
    ids, weights = _route(
        routing_logits, routing_bias, top_k, n_group, topk_group, routed_scaling_factor, routing_method_type
    )
    return _answer(_Layer(**layer), ids.long() - local_expert_offset, weights, output, do_finalize=do_finalize)


def _unpack_topk(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack int32 (id << 16 | bfloat16 bits) to ids (int64) and weights (float32). An id of -1 stays -1."""
    if packed.dtype != torch.int32:
        raise ValueError(f"packed topk_ids must be int32, got {packed.dtype}")
    return (packed >> 16).long(), packed.to(torch.int16).view(torch.bfloat16).float()


def _route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    routed_scaling_factor: float | None,
    method: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts as the kernel does. Return ids (int64) and weights (bfloat16), both [tokens, top_k].

    Equal scores go to the lower expert id, and weights are rounded to bfloat16, as in the kernel.
    """
    if bias is not None and method not in (ROUTING_DEEPSEEK_V3, ROUTING_MINIMAX2):
        raise NotImplementedError(f"routing_bias with routing_method_type={method}")
    # Compute in float64. Vectorized and scalar exponentials differ in the last bit, and the position in the batch
    # decides between them. The rounding to float32 removes this difference.
    logits = logits.double()
    if method in (ROUTING_DEFAULT, ROUTING_RENORMALIZE_NAIVE):  # softmax over all experts, then the best
        scores = logits.softmax(-1).float()
    elif method in (ROUTING_DEEPSEEK_V3, ROUTING_SIGMOID_RENORM, ROUTING_MINIMAX2, ROUTING_SIGMOID):
        scores = logits.sigmoid().float()
    elif method in (ROUTING_RENORMALIZE, ROUTING_LLAMA4):  # the best, then their scores
        scores = logits
    else:
        raise NotImplementedError(f"routing_method_type={method}: only 0 to 4 and 6 to 8")
    biased = scores if bias is None else scores + bias.float()
    if method == ROUTING_DEEPSEEK_V3 and n_group is not None and n_group > 1:
        biased = _limit_to_groups(biased, n_group, topk_group)
    ids = _best(biased, top_k)
    weights = scores.gather(-1, ids)
    if method == ROUTING_RENORMALIZE:
        weights = weights.softmax(-1)
    elif method == ROUTING_LLAMA4:
        weights = weights.sigmoid()
    elif method in (ROUTING_RENORMALIZE_NAIVE, ROUTING_SIGMOID_RENORM, ROUTING_MINIMAX2):
        weights = weights / _row_sum(weights)
    elif method == ROUTING_DEEPSEEK_V3:
        weights = weights * (1.0 if routed_scaling_factor is None else routed_scaling_factor) / _row_sum(weights)
    return ids, weights.float().bfloat16()


def _best(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Return the indices of the k largest values of each row, largest first. If values are equal, the lower index comes
    first.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum each row, [n, k] to [n, 1], in an order that does not depend on n. The order of ``torch.sum`` may depend on
    n."""
    return sum((x[:, i : i + 1] for i in range(1, x.shape[1])), x[:, :1])


def _limit_to_groups(biased: torch.Tensor, n_group: int, topk_group: int | None) -> torch.Tensor:
    """Exclude all experts outside the ``topk_group`` best groups. A group's score is the sum of its two best
    experts."""
    if not topk_group or biased.shape[-1] % n_group:
        raise ValueError(f"n_group={n_group} needs topk_group and a number of experts that it divides")
    grouped = biased.unflatten(-1, (n_group, -1))
    group_score = grouped.topk(2, dim=-1).values
    chosen = _best(group_score[..., 0] + group_score[..., 1], topk_group)
    keep = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, chosen, True)
    return grouped.masked_fill(~keep.unsqueeze(-1), float("-inf")).flatten(-2)


@cache
def _unshuffle_orders(
    helper_name: str, rows: int, k: int, gated: bool | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row orders that undo FlashInfer's shuffle of one expert's weights and block scales.

    The orders depend on the shapes alone, so they are cached. The weights are not cached, because they may be loaded
    again.
    """
    from flashinfer.fused_moe import core

    helper: Callable[..., torch.Tensor] = getattr(core, helper_name)
    options = {} if gated is None else {"is_gated_act_gemm": gated}
    weights = torch.empty(rows, k // 2, dtype=torch.uint8)
    scales = torch.empty(rows, k // nvfp4.BLOCK_SIZE, dtype=torch.uint8)
    order = helper({}, weights, _EPILOGUE_TILE_M, **options)
    scale_order = helper({}, scales, _EPILOGUE_TILE_M, num_elts_per_sf=nvfp4.BLOCK_SIZE, **options)
    return order.argsort().to(device), scale_order.argsort().to(device)


def load_weights(
    packed: torch.Tensor, interleaved_scale: torch.Tensor, orders: tuple[torch.Tensor, torch.Tensor] | None = None
) -> torch.Tensor:
    """Decode one expert's weights from the kernel's layout to float64 [rows, K], without the whole-tensor scale.

    :param orders: two tensors, for the FP4 codes and for the block scales. Element i is the position of row i in the
        kernel's layout. ``None``: the rows are not shuffled.
    """
    rows, cols = packed.shape[0], packed.shape[1] * 2 // nvfp4.BLOCK_SIZE
    scales = undo_block_scale_interleave(interleaved_scale, rows, cols)
    if orders:
        packed, scales = packed[orders[0]], scales[orders[1]]
    return nvfp4.decode(packed, scales.view(torch.float8_e4m3fn)).double()


def _answer(
    layer: _Layer, ids: torch.Tensor, weights: torch.Tensor, output: torch.Tensor | None, *, do_finalize: bool
) -> list[torch.Tensor]:
    """Compute the output of an NVFP4 layer with a known routing.

    :param ids: int64 [tokens, top_k], numbers of local experts.
    :param weights: bfloat16 or float32 [tokens, top_k].
    """
    device = layer.hidden_states.device
    (tokens, top_k), hidden = ids.shape, layer.hidden
    if do_finalize:
        if output is None:
            output = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=device)
        fits = output.dim() == 2 and output.shape[0] == tokens and output.shape[1] <= hidden
        if not fits or output.dtype != torch.bfloat16 or not output.is_contiguous():
            # The real kernel uses only the address and does not check shape and strides.
            raise ValueError(f"output must be contiguous bfloat16 [{tokens}, up to {hidden}], got {_describe(output)}")
        _run_experts(layer, ids, weights.float(), output)
        return [output]

    # Each (token, slot) counts as a token of its own, with one expert of weight 1. The pairs are sorted by expert.
    slot_ids = ids.flatten()
    local = (slot_ids >= 0) & (slot_ids < layer.local_num_experts)
    order = torch.where(local, slot_ids, layer.local_num_experts).argsort(stable=True)
    token = order // top_k
    scale = layer.hidden_states_scale.view(torch.uint8)  # some releases of PyTorch cannot index E4M3
    of_slots = replace(
        layer,
        hidden_states=layer.hidden_states[token],
        hidden_states_scale=scale.reshape(tokens, hidden // nvfp4.BLOCK_SIZE)[token],
    )
    rows = torch.empty(tokens * top_k, hidden, dtype=torch.bfloat16, device=device)
    _run_experts(of_slots, slot_ids[order].unsqueeze(1), torch.ones(tokens * top_k, 1, device=device), rows)
    row_of = torch.empty_like(order, dtype=torch.int32)
    row_of[order] = torch.arange(tokens * top_k, dtype=torch.int32, device=device)
    return [rows, weights, row_of.masked_fill_(~local, -1)]


def _run_experts(layer: _Layer, ids: torch.Tensor, weights: torch.Tensor, output: torch.Tensor) -> None:
    """Compute the experts of each token, and write the weighted sum of their results to ``output``.

    :param ids: int64 [tokens, top_k].
    :param weights: float32 [tokens, top_k].
    """
    tokens, hidden, device = layer.hidden_states.shape[0], layer.hidden, layer.hidden_states.device
    if tokens == 0:
        return
    # Allocate the memory that the vendor's kernel uses while it runs, until the result is computed.
    workspace = torch.empty(WORKSPACE_MB.read() << 20, dtype=torch.uint8, device=device)  # noqa: F841
    w13_orders = _unshuffle_orders("_maybe_get_cached_w3_w1_permute_indices", layer.rows, hidden, layer.gated, device)
    w2_orders = _unshuffle_orders("get_w2_permute_indices_with_cache", hidden, layer.intermediate_size, None, device)
    block_scale = layer.hidden_states_scale.view(torch.float8_e4m3fn).reshape(tokens, hidden // nvfp4.BLOCK_SIZE)
    if layer.has_triton_kernels and (kernels := _triton()):
        scaled = replace(layer, hidden_states_scale=block_scale)
        kernels.run_experts(scaled, (w13_orders, w2_orders), ids, weights, output)
        return
    x = nvfp4.decode(layer.hidden_states, block_scale).double()
    total = torch.zeros(tokens, hidden, dtype=torch.float32, device=device)
    for expert in ids[(ids >= 0) & (ids < layer.local_num_experts)].unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gemm1 = x[token] @ load_weights(layer.gemm1_weights[expert], layer.gemm1_weights_scale[expert], w13_orders).T
        w2 = load_weights(layer.gemm2_weights[expert], layer.gemm2_weights_scale[expert], w2_orders)
        # The multiplier for the intermediate is in output1_scale_scalar, so 1 here.
        gemm2 = nvfp4.decode(*nvfp4.quantize(layer.activate(gemm1, expert), 1.0)).double() @ w2.T
        expert_output = (gemm2 * layer.output2_scale_scalar[expert].double()).float()
        total.index_add_(0, token, expert_output * weights[token, slot].unsqueeze(-1))
    output.copy_(total[:, : output.shape[1]])


@cache
def _triton() -> Any:
    """Return the module with the reference kernels in Triton, or ``None`` if Triton is not installed."""
    return importlib.import_module(f"{__package__}.nvfp4_triton") if util.find_spec("triton") else None


def _check_shape(name: str, tensor: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    if tensor is None:
        raise ValueError(f"{name} must be given")
    if tensor.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")


def _describe(tensor: torch.Tensor) -> str:
    contiguous = "" if tensor.is_contiguous() else "non-contiguous "
    return f"{contiguous}{tensor.dtype} {list(tensor.shape)}"
