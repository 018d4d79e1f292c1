"""Decide from a server's settings whether its activations may come from expandable segments.

Expandable segments are memory of PyTorch's allocator that the driver maps in pieces. All functions are pure functions
of settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_moe_patches.core.patch import Skip
from sglang_moe_patches.core.variables import Variable

_SETTINGS = {"": None, "on": True, "off": False}


def _parse_setting(text: str) -> bool | None:
    """Parse ``SGLANG_MOE_PATCHES_SEGMENTS``: True for ``on``, False for ``off``, ``None`` if it is unset."""
    if text not in _SETTINGS:
        raise ValueError(f"expected on or off, got {text!r}")
    return _SETTINGS[text]


SEGMENTS = Variable(
    "SGLANG_MOE_PATCHES_SEGMENTS",
    "on or off; unset: on for kinds of servers that were tested on a GPU",
    _parse_setting,
)

CONFIGURATIONS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Names of environment variables with the user's own configuration of PyTorch's allocator. The switch to expandable
segments would reset all of that configuration, so the switch is not made if one of these variables is set."""

TESTED_PYTORCH = ("2.11",)
"""PyTorch releases in which this change has been tested on a GPU."""


def _is_above_one(size: Any) -> bool:
    """Return whether a number of ranks is above 1. The number is ``None`` if the argument is not set."""
    return size not in (None, 0, 1)


def _is_not_one_of(*values: Any) -> Callable[[Any], bool]:
    """Return a function that checks an argument's value.

    The function returns False if the value is ``None``, False or one of ``values``, else True.
    """
    return lambda value: value not in (None, False, *values)


@dataclass(frozen=True)
class Feature:
    """Feature of a server that does not work with expandable segments, or has not been tested with them.

    :param argument: name of the argument in the engine's ``ServerArgs``. A release without this argument does not have
        the feature.
    :param exclusion_reason: why expandable segments cannot be used with this feature. If the reason is empty, the
        combination has not been tested on a GPU, and is used only with ``SGLANG_MOE_PATCHES_SEGMENTS=on``.
    :param is_used: function that receives the argument's value and returns whether the server uses the feature.
    :param name: name in messages. If it is empty, messages use the command-line option of ``argument``.
    """

    argument: str
    exclusion_reason: str = ""
    is_used: Callable[[Any], object] = bool
    name: str = ""

    def __str__(self) -> str:
        return self.name or f"--{self.argument.replace('_', '-')}"


_BY_HANDLE = "which registers memory that is allocated later, or shares it by handle"

FEATURES = (
    Feature("enable_memory_saver", "which replaces cudaMalloc, but expandable segments are not made by cudaMalloc"),
    Feature("disaggregation_mode", _BY_HANDLE, _is_not_one_of("null")),
    Feature("encoder_only", _BY_HANDLE),
    Feature("language_only", _BY_HANDLE),
    Feature("elastic_ep_backend", _BY_HANDLE, _is_not_one_of("none")),
    Feature("load_format", _BY_HANDLE, lambda value: value == "remote_instance", "--load-format remote_instance"),
    Feature("remote_instance_weight_loader_start_seed_via_transfer_engine", _BY_HANDLE),
    Feature("weight_cache_mode", _BY_HANDLE, _is_not_one_of("off")),
    Feature("enable_symm_mem", "which allocates from its own memory pool in every layer"),
    Feature(
        "nnodes",
        "and ranks on other hosts may have other settings, so that the ranks would not decide alike",
        _is_above_one,
    ),
    # Features that have not been tested with expandable segments on a GPU.
    Feature("attn_cp_size", is_used=_is_above_one),
    Feature("dcp_size", is_used=_is_above_one),
    Feature("moe_a2a_backend", is_used=_is_not_one_of("none")),
    Feature("enable_flashinfer_allreduce_fusion", name="FlashInfer's fused all-reduce"),
    Feature("enable_torch_symm_mem"),
    Feature("enable_mscclpp"),
    Feature("enable_pdmux"),
    Feature("speculative_algorithm"),
    Feature("hicache_storage_backend"),
    Feature("enable_lmcache"),
    Feature("kt_weight_path"),
)
"""Features with which expandable segments cannot be used, or are used only if the user sets
``SGLANG_MOE_PATCHES_SEGMENTS=on``. All other features are allowed.

The list does not contain features that receive handles of GPU memory (weight updates by tensor or by IPC, images by
CUDA IPC). Another process makes these handles, and this change does not switch that process's allocator."""

VIT_GRAPHS = "SGLANG_VIT_ENABLE_CUDA_GRAPH"
"""Name of the engine's environment variable that lets a vision tower capture CUDA graphs while the server runs. This
change has not been tested with these graphs on a GPU."""


def skip(setting: bool | None, environ: Mapping[str, str], pytorch: str, server_args: Any | None = None) -> Skip | None:
    """Return why a server's allocator is not switched to expandable segments, or ``None`` if it is.

    :param setting: value of ``SGLANG_MOE_PATCHES_SEGMENTS`` (:func:`_parse_setting`).
    :param environ: environment of the server.
    :param pytorch: version of PyTorch.
    :param server_args: the engine's ``ServerArgs``, resolved. If it is ``None``, only the conditions that are the same
        for all servers of this environment are checked.
    """
    if setting is False:
        return Skip(f"{SEGMENTS.name} is off", can_be_enabled=True)
    if server_args is not None and server_args.device != "cuda":
        return Skip(f"--device is {server_args.device}")
    for name in CONFIGURATIONS:
        if environ.get(name, "").strip():
            return Skip(f"{name} is set, and this change would reset it")
    features = [feature for feature in FEATURES if feature.is_used(getattr(server_args, feature.argument, None))]
    for feature in features:
        if feature.exclusion_reason:
            return Skip(f"{feature} is used, {feature.exclusion_reason}")
    untested = list(map(str, features))
    if (release := ".".join(pytorch.split(".")[:2])) not in TESTED_PYTORCH:
        untested.insert(0, f"PyTorch {release}")
    if server_args is not None and environ.get(VIT_GRAPHS, "").strip().lower() in ("1", "true"):
        untested.append(VIT_GRAPHS)
    if untested and not setting:
        return Skip(
            f"{untested[0]} has not been tested with expandable segments on a GPU; {SEGMENTS.name}=on uses them anyway",
            can_be_enabled=True,
        )
    return None
