"""What each change does to each part of a MoE decoder layer, for the table of families in docs/compatibility.md.

Of releases that are not installed, so that no layer can be built: ``doctor --model`` asks the changes themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_moe_patches.changes.deferred_shared_experts import may_defer
from sglang_moe_patches.core import runners
from sglang_moe_patches.core.dead_input.families import DEEPSEEK
from sglang_moe_patches.core.patch import ACTIVE, Status

ANY_OTHER = "any other"
"""Part of a :class:`Layer`: routed experts with a runner that :mod:`sglang_moe_patches.core.runners` does not name."""
ATTENTION = "attention inputs"
"""Part of a :class:`Layer`."""


@dataclass(frozen=True)
class Layer:
    """A kind of MoE decoder layer, and one part of it.

    :param family: of its model, by the engine's module; ``""``: none that offers its dead input.
    :param shared_experts: whether its shared experts run by themselves.
    :param part: the routed experts, as their runner's ``--moe-runner-backend``, or one of the two above.
    :param out_of_place: whether the engine, by itself, has the routed experts leave their input alone.
    """

    family: str
    shared_experts: bool
    part: str
    out_of_place: bool = False


def _output_buffer(layer: Layer, status: str) -> str:
    if layer.family and layer.part in runners.TRTLLM:
        return "output in the dead input (NVFP4)"
    drops_inputs = layer.part == ATTENTION and layer.family == DEEPSEEK
    return "dropped" if drops_inputs and status == Status.APPLIED else ""


def _deferred_shared_experts(layer: Layer, status: str) -> str:
    defers = layer.shared_experts and may_defer(
        inplace=layer.part not in runners.TRTLLM,
        leaves_input_alone=layer.part in (*runners.TRTLLM, *runners.OUT_OF_PLACE),
        overlapped=False,
        fused=False,
        present=True,
        lora=False,
        all_to_all=False,
    )
    return "shared experts last" if defers and layer.family == DEEPSEEK else ""


def _cutedsl_sizing(layer: Layer, status: str) -> str:
    return "output in the dead input" if layer.family and layer.part == runners.CUTEDSL else ""


def _moe_workspace(layer: Layer, status: str) -> str:
    if layer.part == "marlin":
        return "columns, output in the dead input" if layer.family else "columns"
    if layer.part != "triton":
        return ""
    # Shared experts that run last, or beside these, still read the runner's input.
    input_in_use = layer.shared_experts and (layer.family == DEEPSEEK or layer.out_of_place)
    offered = "output in the dead input" if input_in_use else "in place, the dead input is scratch"
    return f"{offered}; columns" if layer.family else "columns"


EFFECTS: dict[str, Callable[[Layer, str], str]] = {
    "output-buffer": _output_buffer,
    "deferred-shared-experts": _deferred_shared_experts,
    "cutedsl-sizing": _cutedsl_sizing,
    "moe-workspace": _moe_workspace,
}
"""By the change's name. A change that is not named does the same in every layer, or nothing in layers."""


def effect(change: str, layer: Layer, status: str) -> str:
    """What a change does to this part of a layer, in a few words; ``""``: nothing.

    :param status: the change's :class:`Status`, or any other word where it was not asked.
    """
    describe = EFFECTS.get(change)
    return describe(layer, status) if describe and status in ACTIVE else ""
