"""Whether a server's activations may come from expandable segments: pure functions of what it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_moe_patches.variables import Variable

_ASKED = {"on": True, "off": False}


def _on_or_off(text: str) -> bool:
    if text not in _ASKED:
        raise ValueError(f"expected on or off, got {text!r}")
    return _ASKED[text]


SEGMENTS = Variable(
    "SGLANG_MOE_PATCHES_SEGMENTS",
    "on: once a server has started, its activations come from expandable segments",
    _on_or_off,
    "off",
)

CONFIGURATIONS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""A user's own configuration of the allocator: a switch while the server runs would set all of it anew."""

_BY_HANDLE = "which registers memory that comes later, or shares it by handle"

NEVER: Mapping[str, tuple[Callable[[Any], object], str]] = {
    "--enable-memory-saver": (
        lambda a: a.enable_memory_saver,
        "which stands in for cudaMalloc, by which expandable segments are not made",
    ),
    "--disaggregation-mode": (lambda a: a.disaggregation_mode != "null", _BY_HANDLE),
    "--encoder-only": (lambda a: a.encoder_only, _BY_HANDLE),
    "--language-only": (lambda a: a.language_only, _BY_HANDLE),
    "--elastic-ep-backend": (lambda a: a.elastic_ep_backend, _BY_HANDLE),
    "--load-format remote_instance": (lambda a: a.load_format == "remote_instance", _BY_HANDLE),
    "--remote-instance-weight-loader-start-seed-via-transfer-engine": (
        lambda a: a.remote_instance_weight_loader_start_seed_via_transfer_engine,
        _BY_HANDLE,
    ),
    "--enable-symm-mem": (lambda a: a.enable_symm_mem, "whose pool is entered in every layer"),
}
"""Left alone whatever is asked: how a server with it is known, and what it is that stands against it."""


@dataclass(frozen=True)
class Situation:
    """A server, as far as it matters here.

    :param device: ``--device``.
    :param configured: which of ``CONFIGURATIONS`` is set; "": none.
    :param never: what of ``NEVER`` it has.
    """

    device: str = "cuda"
    configured: str = ""
    never: tuple[str, ...] = ()


def situation_of(server_args: Any, environ: Mapping[str, str]) -> Situation:
    """What the engine's (resolved) ``ServerArgs`` say; a release that has no such argument has no such feature."""

    def has(feature: Callable[[Any], object]) -> bool:
        try:
            return bool(feature(server_args))
        except AttributeError:
            return False

    return Situation(
        device=server_args.device,
        configured=next((name for name in CONFIGURATIONS if environ.get(name, "").strip()), ""),
        never=tuple(name for name, (feature, _) in NEVER.items() if has(feature)),
    )


def stands_back(asked: bool, server: Situation) -> str | None:
    """Why a server's allocator is left as it is; ``None``: it is switched over.

    :param asked: ``SGLANG_MOE_PATCHES_SEGMENTS``.
    """
    if not asked:
        return f"{SEGMENTS.name}=on turns it on"
    if server.device != "cuda":
        return f"--device is {server.device}"
    if server.configured:
        return f"{server.configured} is set, and the switch would undo it"
    if server.never:
        return f"of {server.never[0]}, {NEVER[server.never[0]][1]}"
    return None


@dataclass(frozen=True)
class Allocator:
    """PyTorch's allocator of this process.

    :param hip: a PyTorch for AMD's GPUs.
    :param settable: its settings can be changed while it runs.
    :param backend: "native", or another one.
    :param maps: the driver maps memory where it is told to (virtual memory management); ``None``: no driver to ask.
    """

    hip: bool = False
    settable: bool = True
    backend: str = "native"
    maps: bool | None = True


def lacks(found: Allocator) -> str | None:
    """What the allocator lacks for it, or ``None``."""
    if found.hip:
        return "this PyTorch is AMD's: not seen"
    if not found.settable:
        return "this PyTorch's allocator cannot be set while it runs"
    if found.backend != "native":
        return f"the allocator is {found.backend}, not PyTorch's own"
    if found.maps is False:
        return "the driver has no virtual memory management"
    return None
