"""Whether a server's activations may come from expandable segments: pure functions of what it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_moe_patches.core.patch import Skip
from sglang_moe_patches.core.variables import Variable

_ASKED = {"": None, "on": True, "off": False}


def _on_or_off(text: str) -> bool | None:
    if text not in _ASKED:
        raise ValueError(f"expected on or off, got {text!r}")
    return _ASKED[text]


SEGMENTS = Variable(
    "SGLANG_MOE_PATCHES_SEGMENTS",
    "on, off: whether a server's activations come from expandable segments; unset: where that was seen on a GPU",
    _on_or_off,
)

CONFIGURATIONS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""A user's own configuration of the allocator: a switch while the server runs would set all of it anew."""

SEEN_PYTORCH = ("2.11",)
"""Whose allocator was seen to do it on a GPU."""


def _several(size: Any) -> bool:
    return size not in (None, 0, 1)


def _not(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value not in (None, False, *values)


@dataclass(frozen=True)
class Feature:
    """What a server may have that could meet such memory.

    :param argument: of the engine's ``ServerArgs``. A release that has no such argument has no such feature.
    :param why: it rules the change out, even with ``on``; "": it is only off by default, as it was not run on a GPU.
    :param has: whether the argument's value means that the server has it.
    :param name: for people; "": the option.
    """

    argument: str
    why: str = ""
    has: Callable[[Any], object] = bool
    name: str = ""

    def __str__(self) -> str:
        return self.name or f"--{self.argument.replace('_', '-')}"


_BY_HANDLE = "which registers memory allocated later, or shares it by handle"

FEATURES = (
    Feature("enable_memory_saver", "which stands in for cudaMalloc, by which expandable segments are not made"),
    Feature("disaggregation_mode", _BY_HANDLE, _not("null")),
    Feature("encoder_only", _BY_HANDLE),
    Feature("language_only", _BY_HANDLE),
    Feature("elastic_ep_backend", _BY_HANDLE, _not("none")),
    Feature("load_format", _BY_HANDLE, lambda value: value == "remote_instance", "--load-format remote_instance"),
    Feature("remote_instance_weight_loader_start_seed_via_transfer_engine", _BY_HANDLE),
    Feature("weight_cache_mode", _BY_HANDLE, _not("off")),
    Feature("enable_symm_mem", "whose pool is entered in every layer"),
    Feature("nnodes", "whose ranks may have another environment, and could not decide alike", _several),
    # Not tested on a GPU.
    Feature("attn_cp_size", has=_several),
    Feature("dcp_size", has=_several),
    Feature("moe_a2a_backend", has=_not("none")),
    Feature("enable_flashinfer_allreduce_fusion", name="FlashInfer's fused all-reduce"),
    Feature("enable_torch_symm_mem"),
    Feature("enable_mscclpp"),
    Feature("enable_pdmux"),
    Feature("speculative_algorithm"),
    Feature("hicache_storage_backend"),
    Feature("enable_lmcache"),
    Feature("kt_weight_path"),
)
"""Features not listed are allowed.

Receivers of handles are not listed (weight updates by tensor or by IPC, images by CUDA IPC): a handle is made in
another process, and its allocator is not switched.
"""

VIT_GRAPHS = "SGLANG_VIT_ENABLE_CUDA_GRAPH"
"""The engine's variable by which a vision tower captures graphs while it serves. Not tested on a GPU."""


def skip(asked: bool | None, environ: Mapping[str, str], pytorch: str, server_args: Any | None = None) -> Skip | None:
    """Why a server's allocator is left as it is; ``None``: it is switched over.

    :param asked: ``SGLANG_MOE_PATCHES_SEGMENTS``; ``None``: unset.
    :param pytorch: its version.
    :param server_args: the engine's ``ServerArgs``, resolved; ``None``: what holds for all servers of this environment.
    """
    if asked is False:
        return Skip(f"{SEGMENTS.name} is off", can_be_enabled=True)
    if server_args is not None and server_args.device != "cuda":
        return Skip(f"--device is {server_args.device}")
    for name in CONFIGURATIONS:
        if environ.get(name, "").strip():
            return Skip(f"{name} is set, and the switch would undo it")
    features = [feature for feature in FEATURES if feature.has(getattr(server_args, feature.argument, None))]
    for feature in features:
        if feature.why:
            return Skip(f"of {feature}, {feature.why}")
    unseen = list(map(str, features))
    if (release := ".".join(pytorch.split(".")[:2])) not in SEEN_PYTORCH:
        unseen.insert(0, f"PyTorch {release}")
    if server_args is not None and environ.get(VIT_GRAPHS, "").strip().lower() in ("1", "true"):
        unseen.append(VIT_GRAPHS)
    if unseen and not asked:
        return Skip(f"{unseen[0]} was not seen with it on a GPU; {SEGMENTS.name}=on turns it on", can_be_enabled=True)
    return None
