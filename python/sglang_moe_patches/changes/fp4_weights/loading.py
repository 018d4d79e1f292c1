"""Predict the memory that loading a model's experts takes in addition to the weights, without loading the model.

``doctor`` calls this module in a process that has built the model with fake tensors. This module reads the sizes of one
MoE layer, and finds the scales that no kernel reads. :mod:`.sizes` computes the memory from these sizes.
"""

from __future__ import annotations

from typing import Any

from sglang_moe_patches.changes.fp4_weights import (
    _MARLIN_UTILS,
    _MXFP4_METHODS,
    _PREPARE_MXFP4_FOR_MARLIN,
    _SWIZZLED,
)
from sglang_moe_patches.changes.fp4_weights.sizes import Loading, compute_loading
from sglang_moe_patches.changes.fp4_weights.unread import find_unread_scales
from sglang_moe_patches.core import engine, runners


def predict_loading(experts: Any, layers: int, *, patched: bool) -> Loading:
    """Predict the GPU memory that loading a model takes on one rank, in addition to the weights.

    :param experts: a ``FusedMoE`` layer whose weights are not processed yet, or ``None`` if the model has no such
        layer.
    :param layers: number of MoE layers on the rank.
    :param patched: whether the server uses fp4-weights. If it is false, the prediction is for a stock server.
    """
    weight = getattr(experts, "w13_weight", None)
    if weight is None or weight.dim() != 3:
        return Loading()
    count, rows, packed_columns = weight.shape
    return compute_loading(
        runners.find_runner(experts),
        type(runners.find_quantization(experts)).__name__,
        layers=layers,
        experts=count,
        hidden=2 * packed_columns,
        intermediate=rows // 2,
        patched=patched,
        unread=_count_unread_bytes(experts),
    )


def _count_unread_bytes(experts: Any) -> int:
    """Return the bytes of a layer's scales that a stock server keeps although no kernel reads them."""
    is_marlin = runners.find_runner(experts) in runners.MARLIN
    if is_marlin and runners.is_nvfp4(experts):
        swizzled = (experts._parameters.get(name) for name in _SWIZZLED)
        return sum(int(scales.nbytes) for scales in swizzled if scales is not None)
    if type(experts.quant_method).__name__ not in (name for _, name in _MXFP4_METHODS):
        return 0
    return 0 if is_marlin and _engine_deletes_scales() else sum(find_unread_scales(experts).bytes_of.values())


def _engine_deletes_scales() -> bool:
    """Return whether the engine itself deletes the loaded scales when it lays out MXFP4 experts for Marlin."""
    prepare = getattr(engine.import_module(_MARLIN_UTILS), _PREPARE_MXFP4_FOR_MARLIN, None)
    return prepare is not None and bool(engine.find_calls(prepare, "delattr"))
