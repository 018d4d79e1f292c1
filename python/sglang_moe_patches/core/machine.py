"""What this package asks about the machine, and its names there. Imports neither torch nor the engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PLUGIN_NAME = "moe_patches"
"""The name of this package's entry point, and what ``SGLANG_PLUGINS`` must contain where it is set."""


def has_gpu() -> bool:
    """Whether a CUDA driver with a device is installed. Does not initialise CUDA."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists()


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """This package's folder in the user's cache; it need not exist."""
    base = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "sglang-moe-patches"
