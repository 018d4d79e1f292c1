"""Predict the GPU memory that loading FP4 experts takes in addition to the weights that a server reads.

``doctor`` and the documentation's tables use these predictions. This module imports neither torch nor the engine.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_moe_patches.core import runners

PARTS = 40
"""Number of parts into which the experts of a layer are divided. The parts are laid out one after the other. With 40
parts the temporary tensors take less than a quarter of the layer's weights."""
_TEMPORARIES = 9
"""Temporary memory that ``triton_kernels`` takes while it lays out the first GEMM's weights (``w13``), as a multiple of
the bytes of the laid-out weights. A simulation of PyTorch's allocator gave this number."""
_PADDED_TO = 64
"""Padding of a laid-out expert: its number of rows, and the bytes of each row, are multiples of this number in SGLang
0.5.12.post1 to 0.5.17."""
_SCALE_ROWS = 256
"""Padding of the laid-out scales of an expert: their number of rows is a multiple of this number."""
_STOCK_HOLES = 0.085
"""Memory that a stock server loses to holes in its allocator, as a fraction of the laid-out experts' bytes. A hole is
reserved memory that no later tensor fits into. With gpt-oss-120b on one H200 the holes were 5,005 MB of 58.6 GB. For
layers of other sizes, a simulation of PyTorch's allocator gives 8 to 35 %."""
_HOLES_OF_LAYER = 5 << 20
"""Bytes that a rank loses to holes for each MoE layer if experts are laid out in parts. Most holes are unused ends of
the allocator's segments. For gpt-oss-120b with TP=1, 2, 4 and 8, a simulation of PyTorch's allocator gives 3.5 to
7.5 MB. On an H200 with TP=1 the holes of 36 layers were 184 MB."""
_MARLIN = 1.47, 0.21
"""Memory that the repack of one layer for Marlin takes, as a multiple of the layer's packed weights. The first number
is for a stock server, the second for fp4-weights (both on SGLang 0.5.17)."""


class Loading(NamedTuple):
    """GPU memory that loading takes on one rank, in addition to the weights that the rank reads in a forward pass.

    :param unread: bytes of scales that stay allocated although no kernel reads them.
    :param holes: bytes that stay reserved in the allocator, but in pieces that are too small for a large tensor.
    :param transient: largest number of bytes that one layer takes while it is laid out.
    :param growth: bytes by which the laid-out experts are larger than the loaded experts.
    """

    unread: int = 0
    holes: int = 0
    transient: int = 0
    growth: int = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes that stay allocated or reserved after loading, in addition to the weights. The KV cache cannot use this
        memory.
        """
        return self.growth + self.unread + self.holes

    @property
    def required_bytes(self) -> int:
        """Bytes that must be free in addition to the weights. With fewer free bytes the model does not load."""
        return self.kept_bytes + self.transient


def compute_loading(
    runner: str | None,
    method: str,
    *,
    layers: int,
    experts: int,
    hidden: int,
    intermediate: int,
    patched: bool,
    unread: int = 0,
) -> Loading:
    """Return the memory that loading takes on one rank, on a stock server or with fp4-weights.

    All figures are zero unless the layer has FP4 experts on Marlin, or MXFP4 experts on ``triton_kernel``.

    :param runner: the resolved ``--moe-runner-backend``, or ``None`` if it is not known.
    :param method: class name of the layer's quantization method, such as ``Mxfp4MoEMethod``. It is needed because the
        runner ``triton_kernel`` also runs BF16 experts.
    :param layers: MoE layers of this rank.
    :param experts: routed experts of a layer on this rank.
    :param intermediate: intermediate size of an expert on this rank, as the engine pads it.
    :param unread: bytes of one layer's scales that a stock server keeps although no kernel reads them.
    """
    packed = experts * 3 * intermediate * hidden // 2
    kept_bytes = 0 if patched else unread * layers
    if runner in runners.MARLIN and ("mxfp4" in method.lower() or "nvfp4" in method.lower()):
        return Loading(kept_bytes, transient=int(packed * _MARLIN[patched]))
    if runner != runners.TRITON_KERNELS or "mxfp4" not in method.lower():
        return Loading()
    w13 = experts * _pad_size(hidden // 2) * _pad_size(2 * intermediate)
    w2 = experts * _pad_size(intermediate // 2) * _pad_size(hidden)
    scales = packed // 16
    rows_of_scales = _pad_size(2 * intermediate, _SCALE_ROWS) * hidden + _pad_size(hidden, _SCALE_ROWS) * intermediate
    growth = layers * (w13 + w2 - packed + experts * rows_of_scales // 32 - scales)
    if patched:
        step = max(1, experts // PARTS)
        return Loading(0, layers * _HOLES_OF_LAYER, _TEMPORARIES * w13 * step // experts + scales, growth)
    return Loading(kept_bytes, int(_STOCK_HOLES * (w13 + w2) * layers), _TEMPORARIES * w13, growth)


def _pad_size(size: int, multiple: int = _PADDED_TO) -> int:
    return -(-size // multiple) * multiple
