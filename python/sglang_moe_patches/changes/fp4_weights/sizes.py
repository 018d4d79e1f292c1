"""GPU memory that loading FP4 experts takes beside the weights that a server reads, by the sizes of a layer.

Pure arithmetic for ``doctor`` and the pages: this module imports neither torch nor the engine.
"""

from __future__ import annotations

from typing import NamedTuple

PARTS = 40
"""Parts of a layer's experts that are laid out one after the other. A part's temporaries take ten times its weights, so
those of 40 parts take a quarter of a tensor, which is less than a quarter of the layer."""
_TEMPORARIES = 9
"""Copies of the laid-out ``w13`` beside the loaded one while ``triton_kernels`` lays it out (allocator model)."""
_PADDED_TO = 64
"""Rows and columns, in bytes, of a laid-out expert are multiples of this number: 0.5.12.post1 to 0.5.17."""
_STOCK_HOLES = 0.085
"""Holes of a stock server as a share of the laid-out experts: gpt-oss-120b on one H200, 5,005 MB of 58.6 GB. Their size
depends on the order of all allocations. The allocator model gives 8 to 35 % for other sizes."""
_HOLES = 100 << 20
"""Largest sum of holes with parts: a few partly used segments of 20 MiB (allocator model, TP=1, 2, 4 and 8)."""
_MARLIN = 1.47, 0.21
"""Bytes that Marlin's layout of one layer takes, as multiples of its packed weights: stock, fp4-weights (0.5.17)."""
_MARLIN_RUNNERS = ("marlin", "lora_marlin")


class Loading(NamedTuple):
    """GPU memory of one rank beside the weights that it reads.

    :param unread: bytes of scales that stay allocated, and that no kernel reads.
    :param holes: bytes that the allocator reserves for good, and that no large tensor fits into.
    :param transient: most bytes that one layer takes while it is laid out.
    """

    unread: int = 0
    holes: int = 0
    transient: int = 0

    @property
    def kept(self) -> int:
        """Bytes that are missing for the KV cache once the model is loaded."""
        return self.unread + self.holes

    @property
    def least(self) -> int:
        """Bytes that must be free beside all weights, or the model does not load."""
        return self.unread + self.holes + self.transient


def loading_bytes(
    runner: str, method: str, *, layers: int, experts: int, hidden: int, intermediate: int, patched: bool
) -> Loading:
    """Memory that loading takes on one rank, stock or with fp4-weights.

    ``doctor`` adds ``kept`` to the weights before it sizes the KV cache. If less than ``least`` is free beside the
    weights, ``doctor`` says that the model does not load. The format decides, and not the runner alone:
    ``triton_kernel`` runs BF16 experts as well, for which all figures are zero.

    :param runner: the resolved ``--moe-runner-backend``.
    :param method: class name of the layer's quantization method, such as ``Mxfp4MoEMethod``.
    :param layers: MoE layers of this rank.
    :param experts: routed experts of a layer on this rank.
    :param intermediate: intermediate size of an expert on this rank, as the engine pads it.
    """
    packed = experts * 3 * intermediate * hidden // 2
    if runner in _MARLIN_RUNNERS and ("mxfp4" in method.lower() or "nvfp4" in method.lower()):
        return Loading(transient=int(packed * _MARLIN[patched]))
    if runner != "triton_kernel" or "mxfp4" not in method.lower():
        return Loading()
    w13 = experts * _padded(hidden // 2) * _padded(2 * intermediate)
    w2 = experts * _padded(intermediate // 2) * _padded(hidden)
    scales = packed // 16
    if patched:
        step = max(1, experts // PARTS)
        return Loading(holes=_HOLES, transient=_TEMPORARIES * w13 * step // experts + scales)
    return Loading(scales * layers, int(_STOCK_HOLES * (w13 + w2) * layers), _TEMPORARIES * w13)


def _padded(size: int) -> int:
    return -(-size // _PADDED_TO) * _PADDED_TO
