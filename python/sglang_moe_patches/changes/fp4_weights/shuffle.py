"""Permute NVFP4 expert weights and block scales into the TRT-LLM layout, in place.

FlashInfer defines the layout, and this module asks FlashInfer's own helpers for the row indices. Let K be the number of
FP4 elements of a row. The layout moves the elements of a layer's tensors as follows:

* Weights, uint8 ``[experts, rows, K/2]``: whole rows move. All experts of a tensor share one permutation.
* Block scales, one byte each, ``[experts, rows, K/16]``: rows move by the same kind of permutation. Then every tile of
  128 rows is interleaved: ``view(rows/128, 4, 32, K/64, 4)`` with dimensions 1 and 3 swapped, flattened.

A *closed set* of rows is a set that the permutation maps onto itself. A GPU program can shuffle a closed set in place.
Three facts make the shuffle possible without a second copy of the layer:

* A row permutation never mixes columns, so each column strip of an expert can be permuted by itself. One GPU program
  reads all rows of a strip into registers, and only then writes them.
* The permutation of the second GEMM's weights (w2) repeats in tiles of 128 rows, so a tile is a closed set. The same
  holds for the first GEMM's weights (w13) without a gate. With a gate, w13's permutation interleaves the two halves of
  an expert, so its smallest closed set of rows is the whole expert.
* The interleave maps a tile of 128 rows onto the same contiguous bytes, so a tile is a closed set, too.

Every operation exists twice: as a Triton kernel, and in plain PyTorch with a scratch buffer of limited size. Both give
the same result bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from sglang_moe_patches.core import log

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch have no Triton: the plain PyTorch operations then do all the work
    triton = None


#: Number of rows of the epilogue tile for which the TRT-LLM kernels are built. The engine passes the same number to
#: FlashInfer.
EPILOGUE_TILE_ROWS = 128
#: Number of rows of one interleaved block of scales. A row permutation that repeats is also processed in tiles of this
#: size.
TILE_ROWS = 128
#: Number of FP4 elements that share a block scale.
SCALE_BLOCK = 16
#: Largest scratch buffer of the plain PyTorch operations, in bytes.
SCRATCH_BYTES = 16 << 20
#: Largest number of bytes that one program of a Triton kernel keeps in registers: half of a multiprocessor's register
#: file.
MAX_PROGRAM_BYTES = 128 << 10
#: Number of bytes that one thread keeps in registers. On an H200 this was faster than more threads with 128 bytes each
#: (docs/benchmarks).
THREAD_BYTES = 256

Shuffled = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


# --- What moves where: pure functions of the layer's sizes -----------------------------------------------------------


class NotInPlace(ValueError):
    """Raised if the weights cannot be shuffled in place, before any tensor is changed.

    Either the layout is no permutation of a tensor's rows, or a tensor has an unexpected dtype, shape or stride. The
    engine's own function then shuffles the weights.
    """


class RowPermutation(NamedTuple):
    """Permutation of the rows of one expert: ``result[i] = source[rows[i]]``.

    :param rows: int64 ``[rows]``, on the CPU.
    :param tile: int64 ``[TILE_ROWS]``, the permutation within a tile. It is ``None`` if the tiles have different
        permutations.
    """

    rows: torch.Tensor
    tile: torch.Tensor | None

    @property
    def kernel_index(self) -> torch.Tensor:
        """Row numbers that the Triton kernel reads: ``tile`` if all tiles have the same permutation, else ``rows``."""
        return self.rows if self.tile is None else self.tile


def compute_matrix_shapes(hidden_size: int, intermediate_size: int, is_gated: bool) -> tuple[tuple[str, int, int], ...]:
    """Return the sizes of a layer's four tensors: the weights and scales of both GEMMs.

    :returns: one tuple for each tensor: its parameter name in the engine's
        ``prepare_static_weights_for_trtllm_fp4_moe``, the rows of an expert, and the bytes of a row.
    """
    gemm1_rows = (2 if is_gated else 1) * intermediate_size
    return (
        ("gemm1_weights", gemm1_rows, hidden_size // 2),
        ("gemm1_scales_linear_fp4_bytes", gemm1_rows, hidden_size // SCALE_BLOCK),
        ("gemm2_weights", hidden_size, intermediate_size // 2),
        ("gemm2_scales_linear_fp4_bytes", hidden_size, intermediate_size // SCALE_BLOCK),
    )


def find_repeating_tile(rows: torch.Tensor) -> torch.Tensor | None:
    """Return the permutation that all tiles of a matrix repeat, or ``None`` if there is no such permutation.

    The tiles are consecutive groups of TILE_ROWS rows. In a repeating permutation, each row stays in its tile, and all
    tiles have the same permutation.

    :param rows: int64 ``[n]``, a permutation of ``range(n)``.
    """
    if rows.numel() % TILE_ROWS:
        return None
    starts = torch.arange(0, rows.numel(), TILE_ROWS, device=rows.device)
    tiles = rows.view(-1, TILE_ROWS) - starts[:, None]
    first = tiles[0]
    return first.contiguous() if bool((tiles == first).all()) and int(first.max()) < TILE_ROWS else None


def _read_flashinfer_rows(name: str, rows: int, row_bytes: int, is_gated: bool) -> torch.Tensor:
    """Return FlashInfer's row index for one expert's matrix: int64 ``[rows]`` on the CPU.

    :raises AssertionError: FlashInfer does not allow the shape.
    """
    from flashinfer.fused_moe import core

    # The helpers read only shape, dtype and device, so one byte stands for the matrix. Weights are sometimes loaded
    # under `with torch.device("cuda")`, but the index must be built on the CPU.
    with torch.device("cpu"):
        matrix = torch.zeros((), dtype=torch.uint8).expand(rows, row_bytes)
        per_scale = SCALE_BLOCK if "scales" in name else None
        if name.startswith("gemm1"):
            index = core._maybe_get_cached_w3_w1_permute_indices(
                {}, matrix, EPILOGUE_TILE_ROWS, num_elts_per_sf=per_scale, is_gated_act_gemm=is_gated
            )
        else:
            index = core.get_w2_permute_indices_with_cache({}, matrix, EPILOGUE_TILE_ROWS, num_elts_per_sf=per_scale)
    return index.to(device="cpu", dtype=torch.int64)


@functools.lru_cache(maxsize=64)
def compute_row_permutations(
    hidden_size: int, intermediate_size: int, is_gated: bool
) -> tuple[RowPermutation, ...] | None:
    """Return the row permutations of a layer's four tensors, or ``None`` if a tensor's layout is no permutation of
    rows.

    The result is cached. Its tensors are on the CPU, because device memory may lose its contents: the engine's memory
    saver may unmap memory that was allocated during loading, for example between RL steps. With cached tensors in this
    memory, the next reload would shuffle rows by a wrong index.

    :raises AssertionError: FlashInfer does not allow the shape.
    """
    permutations = []
    for name, rows, row_bytes in compute_matrix_shapes(hidden_size, intermediate_size, is_gated):
        index = _read_flashinfer_rows(name, rows, row_bytes, is_gated)
        if index.numel() != rows or not torch.equal(index.sort().values, torch.arange(rows, device="cpu")):
            return None
        permutations.append(RowPermutation(index, find_repeating_tile(index)))
    return tuple(permutations)


# --- The Triton kernels ----------------------------------------------------------------------------------------------


class RowKernelConfig(NamedTuple):
    """Launch parameters of the Triton kernel that permutes rows (:func:`_permute_rows_kernel`).

    :param tile_rows: number of rows that one program keeps in registers. The permutation must map these rows onto
        themselves.
    :param strip_bytes: contiguous bytes that a program reads of each row; a power of two.
    :param num_warps: number of warps of one program.
    """

    tile_rows: int
    strip_bytes: int
    num_warps: int


def _round_up_to_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _choose_warps(program_bytes: int) -> int:
    return min(32, max(4, _round_up_to_power_of_2(program_bytes // (THREAD_BYTES * 32))))


def choose_row_kernel_config(rows: int, row_bytes: int, tiled: bool) -> RowKernelConfig | None:
    """Return the launch parameters of the Triton kernel that permutes the rows of matrices of `rows` x `row_bytes`.

    One program permutes one *strip*: a range of columns, in all rows of a tile. The program keeps the strip in
    registers. It uses the widest strip that fits into the registers, from 16 bytes (one vector load) to 256 bytes,
    because wide strips were fastest on an H200.

    :param tiled: whether the permutation repeats in tiles of TILE_ROWS rows. Otherwise the tile is the whole matrix.
    :returns: ``None`` if a strip of 16 bytes does not fit into the registers, if `row_bytes` is no multiple of 4, or if
        `rows` is no multiple of the tile's rows.
    """
    tile_rows = TILE_ROWS if tiled else rows
    if row_bytes % 4 or rows % tile_rows:
        return None
    block_rows = _round_up_to_power_of_2(tile_rows)
    widest = max(16, _round_up_to_power_of_2(row_bytes))
    for strip in (256, 128, 64, 32, 16):
        strip = min(strip, widest)
        if block_rows * strip <= MAX_PROGRAM_BYTES:
            return RowKernelConfig(tile_rows, strip, _choose_warps(block_rows * strip))
    return None


def choose_interleave_warps(row_bytes: int) -> int | None:
    """Return the number of warps with which the Triton kernel interleaves a tile of scales.

    :param row_bytes: bytes of a row of scales.
    :returns: ``None`` if a tile does not fit into a program's registers, or `row_bytes` is no multiple of 4.
    """
    program_bytes = TILE_ROWS * max(4, _round_up_to_power_of_2(row_bytes))
    return None if row_bytes % 4 or program_bytes > MAX_PROGRAM_BYTES else _choose_warps(program_bytes)


if triton is not None:

    @triton.jit
    def _permute_rows_kernel(  # type: ignore[no-untyped-def]
        words_ptr,
        index_ptr,
        ROW_WORDS: tl.constexpr,
        TILE_ROWS: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        STRIP_WORDS: tl.constexpr,
    ):
        """Permute the rows of one column strip of one tile: ``tile[i, strip] = tile[index[i], strip]``.

        `words_ptr` is a matrix of 4-byte words, and `index_ptr` is int32 ``[TILE_ROWS]``. Strips of a tile are
        neighbours in the grid, so they run at the same time and share DRAM pages and cache lines.
        """
        STRIPS: tl.constexpr = (ROW_WORDS + STRIP_WORDS - 1) // STRIP_WORDS
        pid = tl.program_id(0)
        # 64 bits: a tensor of experts is larger than 4 GiB for unsharded models.
        tile_ptr = words_ptr + (pid // STRIPS).to(tl.int64) * (TILE_ROWS * ROW_WORDS)
        row = tl.arange(0, BLOCK_ROWS)
        column = (pid % STRIPS) * STRIP_WORDS + tl.arange(0, STRIP_WORDS)
        if BLOCK_ROWS == TILE_ROWS:
            source = tl.load(index_ptr + row)
        else:
            source = tl.load(index_ptr + row, mask=row < TILE_ROWS, other=0)
        source_ptr = tile_ptr + source[:, None] * ROW_WORDS + column[None, :]
        target_ptr = tile_ptr + row[:, None] * ROW_WORDS + column[None, :]
        # Source and target are the same memory. A thread may overwrite rows that *other* threads of the program read.
        # The barrier makes every load of the program happen before any of its stores. No other program uses this strip.
        if BLOCK_ROWS == TILE_ROWS and ROW_WORDS % STRIP_WORDS == 0:
            words = tl.load(source_ptr)
            tl.debug_barrier()
            tl.store(target_ptr, words)
        else:
            inside = (row < TILE_ROWS)[:, None] & (column < ROW_WORDS)[None, :]
            words = tl.load(source_ptr, mask=inside)
            tl.debug_barrier()
            tl.store(target_ptr, words, mask=inside)

    @triton.jit
    def _interleave_tiles_kernel(  # type: ignore[no-untyped-def]
        words_ptr,
        index_ptr,
        ROW_WORDS: tl.constexpr,
        BLOCK_WORDS: tl.constexpr,
        PERMUTE: tl.constexpr,
    ):
        """Permute the 128 rows of one tile of scales by `index_ptr` (if PERMUTE) and interleave it, in place.

        A word is four scales that stay together. The word in row ``32*q + r`` and column ``k`` of the tile moves to
        position ``128*k + 4*r + q``. Loads and stores are contiguous. The words are transposed in registers.
        """
        # 64 bits: a tensor of experts is larger than 4 GiB for unsharded models.
        tile_ptr = words_ptr + tl.program_id(0).to(tl.int64) * (128 * ROW_WORDS)
        q = tl.arange(0, 4)
        r = tl.arange(0, 32)
        k = tl.arange(0, BLOCK_WORDS)
        row = q[:, None, None] * 32 + r[None, :, None]
        if PERMUTE:
            row = tl.load(index_ptr + row)
        words = tl.load(tile_ptr + row * ROW_WORDS + k[None, None, :], mask=(k < ROW_WORDS)[None, None, :])
        words = tl.permute(words, (2, 1, 0))
        target_ptr = tile_ptr + k[:, None, None] * 128 + r[None, :, None] * 4 + q[None, None, :]
        # The barrier makes every load of the program happen before any of its stores, as in _permute_rows_kernel.
        tl.debug_barrier()
        tl.store(target_ptr, words, mask=(k < ROW_WORDS)[:, None, None])


def _select_device(tensor: torch.Tensor) -> Any:
    # Triton launches on the current device, which need not be the tensor's.
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def permute_rows_triton(matrices: torch.Tensor, index: torch.Tensor, config: RowKernelConfig) -> None:
    """Permute the rows of every matrix in place with the Triton kernel.

    :param matrices: uint8 ``[experts, rows, row_bytes]``, contiguous, 16-byte aligned, row_bytes a multiple of 4.
    :param index: int32 ``[config.tile_rows]`` on the same device; ``result[i] = source[index[i]]`` within each tile.
    """
    words = matrices.view(torch.int32)
    experts, rows, row_words = words.shape
    strip_words = config.strip_bytes // 4
    grid = (experts * (rows // config.tile_rows) * triton.cdiv(row_words, strip_words),)
    with _select_device(matrices):
        _permute_rows_kernel[grid](
            words,
            index,
            ROW_WORDS=row_words,
            TILE_ROWS=config.tile_rows,
            BLOCK_ROWS=_round_up_to_power_of_2(config.tile_rows),
            STRIP_WORDS=strip_words,
            num_warps=config.num_warps,
        )


def interleave_tiles_triton(scales: torch.Tensor, index: torch.Tensor | None, num_warps: int) -> None:
    """Interleave every 128-row tile of scales in place with the Triton kernel. If ``index`` is given, permute the rows
    of each tile first.

    :param scales: uint8 ``[experts, rows, row_bytes]``, contiguous, 16-byte aligned, row_bytes a multiple of 4.
    :param index: int32 ``[TILE_ROWS]`` on the same device, or ``None`` to leave the rows in order.
    """
    words = scales.view(torch.int32)
    experts, rows, row_words = words.shape
    with _select_device(scales):
        _interleave_tiles_kernel[(experts * (rows // TILE_ROWS),)](
            words,
            words if index is None else index,
            ROW_WORDS=row_words,
            BLOCK_WORDS=_round_up_to_power_of_2(row_words),
            PERMUTE=index is not None,
            num_warps=num_warps,
        )


# --- The same in plain PyTorch ---------------------------------------------------------------------------------------


def _allocate_scratch(matrices: torch.Tensor, at_least: int) -> torch.Tensor:
    """Return a uint8 scratch buffer as large as `matrices`, but of at most SCRATCH_BYTES.

    :param at_least: smallest number of bytes with which the caller can work. The buffer has at least this size, even if
        it is above SCRATCH_BYTES.
    """
    size = max(at_least, min(SCRATCH_BYTES, matrices.numel()))
    return torch.empty(size, dtype=torch.uint8, device=matrices.device)


def permute_rows_plain(matrices: torch.Tensor, index: torch.Tensor) -> None:
    """Permute the rows of every matrix in place with PyTorch's operations, for a few experts (or a few columns) at a
    time.

    :param matrices: uint8 ``[experts, rows, row_bytes]``, contiguous.
    :param index: int64 ``[rows]`` on the same device; ``result[i] = source[index[i]]``.
    """
    experts, rows, row_bytes = matrices.shape
    scratch = _allocate_scratch(matrices, at_least=rows)
    width = min(row_bytes, scratch.numel() // rows)
    step = max(1, scratch.numel() // (rows * row_bytes))
    for first in range(0, experts, step):
        for left in range(0, row_bytes, width):
            part = matrices[first : first + step, :, left : left + width]
            permuted = scratch[: part.numel()].view(part.shape)
            torch.index_select(part, 1, index, out=permuted)
            part.copy_(permuted)


def interleave_tiles_plain(scales: torch.Tensor, index: torch.Tensor | None) -> None:
    """Interleave every 128-row tile of scales in place with PyTorch's operations, some tiles at a time.

    If ``index`` is given, permute the rows of each tile first.

    :param scales: uint8 ``[experts, rows, row_bytes]``, contiguous, rows a multiple of 128, row_bytes a multiple
        of 4.
    :param index: int64 ``[TILE_ROWS]`` on the same device, or ``None`` to leave the rows in order.
    """
    row_bytes = scales.shape[-1]
    tiles = scales.view(-1, TILE_ROWS, row_bytes)
    scratch = _allocate_scratch(scales, at_least=TILE_ROWS * row_bytes)
    step = scratch.numel() // (TILE_ROWS * row_bytes)
    for first in range(0, tiles.shape[0], step):
        part = tiles[first : first + step]
        rows = scratch[: part.numel()].view(part.shape)
        if index is None:
            rows.copy_(part)
        else:
            torch.index_select(part, 1, index, out=rows)
        blocks = rows.view(-1, 4, 32, row_bytes // 4, 4).transpose(1, 3)
        part.view(blocks.shape).copy_(blocks)


# --- One layer: the Triton kernels where they can run, else plain PyTorch --------------------------------------------


def uses_triton(device: torch.device) -> bool:
    return device.type == "cuda" and triton is not None


def _upload(permutations: Sequence[RowPermutation], device: torch.device) -> Sequence[torch.Tensor | None]:
    """Send the row numbers (`kernel_index`) of all permutations to the device, for the Triton kernels.

    A single asynchronous transfer (``non_blocking``) sends all row numbers, at most some tens of KB. The CPU tensor may
    nevertheless be freed when this function returns. Its memory is pageable, so CUDA reads it before the call that
    starts the transfer returns.

    :returns: one int32 tensor on the device for each permutation. If the device runs no Triton kernels, nothing is
        sent, and the result has ``None`` for each permutation.
    """
    if not uses_triton(device):
        return [None] * len(permutations)
    indices = [permutation.kernel_index for permutation in permutations]
    packed = torch.cat(indices).to(torch.int32).to(device, non_blocking=True)
    return packed.split([index.numel() for index in indices])


def _try_kernel(
    name: str, uploaded: torch.Tensor | None, launch: Callable[..., None], matrices: torch.Tensor, *arguments: Any
) -> bool:
    """Launch a Triton kernel on ``matrices`` if possible, and return whether it was launched.

    If the kernel cannot be compiled or launched, log a warning, and leave ``matrices`` unchanged.
    """
    if uploaded is None or matrices.data_ptr() % 16:
        return False
    try:
        launch(matrices, *arguments)
        return True
    except Exception as error:
        _warn_no_kernel(name, str(error) or type(error).__name__)
        return False


def _permute_rows(matrices: torch.Tensor, permutation: RowPermutation, uploaded: torch.Tensor | None) -> None:
    _, rows, row_bytes = matrices.shape
    config = choose_row_kernel_config(rows, row_bytes, permutation.tile is not None)
    if config and _try_kernel("row permutation", uploaded, permute_rows_triton, matrices, uploaded, config):
        return
    # If every tile has the same permutation, tiles are permuted as small matrices, which need less scratch memory.
    index = permutation.kernel_index
    permute_rows_plain(matrices.view(-1, index.numel(), row_bytes), index.to(matrices.device))


def _shuffle_scales(scales: torch.Tensor, permutation: RowPermutation, uploaded: torch.Tensor | None) -> None:
    tile = permutation.tile
    if tile is None:
        # The permutation may move any row of an expert to any other row, and an expert's whole matrix is too large for
        # one program. The scales are therefore shuffled in two passes, each in place: first the rows, then the tiles.
        # The scales are an eighth of the layer's bytes.
        _permute_rows(scales, permutation, uploaded)
    warps = choose_interleave_warps(scales.shape[-1])
    index = None if tile is None else uploaded
    if warps and _try_kernel("interleave", uploaded, interleave_tiles_triton, scales, index, warps):
        return
    interleave_tiles_plain(scales, None if tile is None else tile.to(scales.device))


@functools.lru_cache(maxsize=8)  # once per process and reason, not once per layer
def _warn_no_kernel(name: str, reason: str) -> None:
    log.logger.warning(
        log.format_line(
            "fp4-weights", "no Triton kernel for the %s (%s), so loading uses plain PyTorch, which is slower"
        ),
        name,
        reason,
    )


def _find_layout_error(gemm1_rows: int, hidden_size: int, intermediate_size: int) -> str | None:
    """Return an error message if the layout does not allow the sizes, else ``None``. The message names the tensor and
    the reason.
    """
    rows_rule = f"must be a multiple of {TILE_ROWS}, the rows of one interleaved block of scales"
    if gemm1_rows % TILE_ROWS:
        return f"gemm1_scales_linear_fp4_bytes: its rows ({gemm1_rows}) {rows_rule}"
    if hidden_size % TILE_ROWS:
        return f"gemm2_scales_linear_fp4_bytes: its rows (hidden_size {hidden_size}) {rows_rule}"
    if intermediate_size % (4 * SCALE_BLOCK):
        return (
            f"gemm2_scales_linear_fp4_bytes: its columns (intermediate_size {intermediate_size} / {SCALE_BLOCK}) must "
            "be a multiple of 4, the scales that stay together"
        )
    return None


def _view_expert_matrices(name: str, tensor: torch.Tensor, experts: int, rows: int, row_bytes: int) -> torch.Tensor:
    """Return a uint8 view ``[experts, rows, row_bytes]`` of `tensor`, on the same storage.

    :raises NotInPlace: the tensor's dtype, shape or strides do not allow the view. The message says which
        dtype, shape or strides are required.
    """
    if tensor.dtype.itemsize != 1 or tensor.dtype == torch.bool:
        raise NotInPlace(f"{name}: must have a one-byte dtype such as uint8 or float8_e4m3fn, not {tensor.dtype}")
    expected_shape = (experts, rows, row_bytes)
    shape = tuple(tensor.shape)
    # The engine's own function reshapes its arguments, so leading dimensions may be flattened. The bytes of a row, or
    # all bytes, must agree with the sizes.
    same_rows = len(shape) == 1 or (len(shape) > 1 and shape[-1] == row_bytes)
    if shape != expected_shape and not (same_rows and tensor.numel() == experts * rows * row_bytes):
        raise NotInPlace(
            f"{name}: must have shape [num_experts, rows, row bytes] = {list(expected_shape)}, not {list(shape)}"
        )
    if not tensor.is_contiguous():
        raise NotInPlace(f"{name}: must be contiguous, not strided {tuple(tensor.stride())} for shape {list(shape)}")
    # ``detach()`` returns a plain tensor, even if the argument is an object of a subclass of Parameter.
    return tensor.detach().view(torch.uint8).view(expected_shape)


@torch.no_grad()
def prepare_static_weights_for_trtllm_fp4_moe(
    gemm1_weights: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm1_scales_linear_fp4_bytes: torch.Tensor,
    gemm2_scales_linear_fp4_bytes: torch.Tensor,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    is_gated: bool = True,
) -> Shuffled:
    """Shuffle one layer's NVFP4 expert weights and block scales for the TRT-LLM kernels, **in place**.

    The engine's function of this name returns the same values, shapes and dtypes in new tensors, and the engine copies
    them into the parameters. This function shuffles the contents of its inputs, and returns views of the inputs.

    A reload writes raw weights into the parameters and shuffles them again, as in the stock engine. If this function
    runs twice without a reload, or after a reload of only some experts, rows are shuffled twice, as in the stock
    engine.

    :param gemm1_weights: w13, one-byte dtype, ``[num_experts, rows, hidden_size/2]``, with rows 2 * intermediate_size
        if is_gated, else intermediate_size.
    :param gemm2_weights: w2, one-byte dtype, ``[num_experts, hidden_size, intermediate_size/2]``.
    :param gemm1_scales_linear_fp4_bytes: one-byte dtype, ``[num_experts, rows of gemm1_weights, hidden_size/16]``.
    :param gemm2_scales_linear_fp4_bytes: one-byte dtype, ``[num_experts, hidden_size, intermediate_size/16]``.
    :param hidden_size: in elements, a multiple of 128.
    :param intermediate_size: in elements, on this rank, padding included; a multiple of 64, or of 128 without a gate.
    :param num_experts: experts on this rank, at least 1.
    :param is_gated: whether w13 contains two matrices of intermediate_size rows each, one after the other. The shuffle
        interleaves their rows.
    :returns: gemm1 weights (uint8), gemm1 scales (float8_e4m3fn), gemm2 weights (uint8) and gemm2 scales
        (float8_e4m3fn). Each result has the three-dimensional shape of its parameter.
    :raises ValueError: a size or device is not allowed. The message explains why. No tensor was changed.
    :raises NotInPlace: a dtype, shape or stride is not allowed, or tensors of these sizes cannot be shuffled in place.
        No tensor was changed.
    """
    if num_experts < 1 or hidden_size < 1 or intermediate_size < 1:
        raise ValueError(
            "num_experts, hidden_size and intermediate_size must be positive, "
            f"not {num_experts}, {hidden_size} and {intermediate_size}"
        )
    tensors = (gemm1_weights, gemm1_scales_linear_fp4_bytes, gemm2_weights, gemm2_scales_linear_fp4_bytes)
    shapes = compute_matrix_shapes(hidden_size, intermediate_size, is_gated)
    gemm1, gemm1_scales, gemm2, gemm2_scales = matrices = [
        _view_expert_matrices(name, tensor, num_experts, rows, row_bytes)
        for tensor, (name, rows, row_bytes) in zip(tensors, shapes, strict=True)
    ]
    device = gemm1.device
    for matrix, (name, _, _) in zip(matrices, shapes, strict=True):
        if matrix.device != device:
            raise ValueError(f"{name}: must be on the device of gemm1_weights, {device}, not on {matrix.device}")

    layout_error = _find_layout_error(gemm1.shape[1], hidden_size, intermediate_size)
    try:
        permutations = compute_row_permutations(hidden_size, intermediate_size, bool(is_gated))
    except AssertionError as error:  # the engine's own function refuses such a shape, too
        message = f"gemm1_weights, gemm2_weights: FlashInfer refuses the shape: {error}"
        raise ValueError(layout_error or message) from error
    if permutations is None or layout_error is not None:
        raise NotInPlace(layout_error or "gemm1_weights, gemm2_weights: the layout is no permutation of rows")
    uploaded = _upload(permutations, device)
    _permute_rows(gemm1, permutations[0], uploaded[0])
    _shuffle_scales(gemm1_scales, permutations[1], uploaded[1])
    _permute_rows(gemm2, permutations[2], uploaded[2])
    _shuffle_scales(gemm2_scales, permutations[3], uploaded[3])
    return gemm1, gemm1_scales.view(torch.float8_e4m3fn), gemm2, gemm2_scales.view(torch.float8_e4m3fn)
