"""Predict the GPU memory that loading FP4 experts takes in addition to the weights that a server reads.

Pure arithmetic for ``doctor`` and the pages: this module imports neither torch nor the engine.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_moe_patches.core import runners

PARTS = 40
"""Number of parts into which the experts of a layer are divided. The parts are laid out one after the other. A part's
temporaries take ten times the part's weights. With 40 parts they take a quarter of a tensor, which is less than a
quarter of the layer's weights."""
_TEMPORARIES = 9
"""Memory that ``triton_kernels`` takes in addition to the loaded ``w13`` while it lays ``w13`` out, as a multiple of
the laid-out ``w13``. Computed with a model of PyTorch's allocator."""
_PADDED_TO = 64
"""Padding of a laid-out expert: its rows and columns are multiples of this number of bytes (0.5.12.post1 to 0.5.17)."""
_SCALE_ROWS = 256
"""Padding of the laid-out scales of an expert: they have a multiple of this number of rows."""
_STOCK_HOLES = 0.085
"""Memory lost to holes in the allocator of a stock server, as a fraction of the laid-out experts' bytes. With
gpt-oss-120b on one H200 it is 5,005 MB of 58.6 GB. A hole is reserved memory that no later tensor fits into. The size
of the holes depends on the order of all allocations. The allocator model gives 8 to 35 % for other sizes."""
_HOLES = 100 << 20
"""Largest number of bytes lost to holes on a rank if experts are laid out in parts. A hole is the unused rest of a 20
MiB segment. Computed with the allocator model for TP=1, 2, 4 and 8."""
_MARLIN = 1.47, 0.21
"""Memory that Marlin's layout of one layer takes, as multiples of the layer's packed weights (0.5.17). The first number
is for a stock server, the second for fp4-weights."""


class Loading(NamedTuple):
    """GPU memory that loading takes on one rank, in addition to the weights that the rank reads in a forward pass.

    :param unread: bytes of scales that stay allocated although no kernel reads them.
    :param holes: bytes that the allocator reserves for good, and that no large tensor fits into.
    :param transient: largest number of bytes that one layer takes while it is laid out.
    :param growth: bytes by which the laid-out experts are larger than the loaded experts.
    """

    unread: int = 0
    holes: int = 0
    transient: int = 0
    growth: int = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes beside the weights that stay allocated or reserved after loading. The KV cache cannot use them."""
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
    in_place: bool = True,
) -> Loading:
    """Return the memory that loading takes on one rank, on a stock server or with fp4-weights.

    A prediction of ``doctor --model`` reduces the KV cache by :attr:`Loading.kept_bytes`. The model does not load if
    less than :attr:`Loading.required_bytes` is free in addition to the weights. Both ``runner`` and ``method`` are
    needed, because ``triton_kernel`` also runs BF16 experts, for which all figures are zero.

    :param runner: the resolved ``--moe-runner-backend``, or ``None`` if it is not known.
    :param method: class name of the layer's quantization method, such as ``Mxfp4MoEMethod``.
    :param layers: MoE layers of this rank.
    :param experts: routed experts of a layer on this rank.
    :param intermediate: intermediate size of an expert on this rank, as the engine pads it.
    :param unread: bytes of one layer's scales that a stock server keeps although no kernel reads them.
    :param in_place: whether fp4-weights can write the layout for ``triton_kernels`` over the loaded experts.
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
        own = 0 if in_place else w13 + w2
        return Loading(0, _HOLES, own + _TEMPORARIES * w13 * step // experts + scales, growth)
    return Loading(kept_bytes, int(_STOCK_HOLES * (w13 + w2) * layers), _TEMPORARIES * w13, growth)


def _pad_size(size: int, multiple: int = _PADDED_TO) -> int:
    return -(-size // multiple) * multiple
