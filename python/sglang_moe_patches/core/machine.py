"""Facts about the machine, and the name of this package's plugin. This module imports neither torch nor the engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PLUGIN_NAME = "moe_patches"
"""Name of this package's entry point. If ``SGLANG_PLUGINS`` is set, it must contain this name."""


def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA driver or GPU. The check does not initialize CUDA."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists()


def find_cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return this package's folder in the user's cache. The folder may not exist."""
    base = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "sglang-moe-patches"
