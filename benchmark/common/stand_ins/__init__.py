"""What the engine's client and its tests import, and only a download needs: for where it is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def folders() -> list[str]:
    """For ``PYTHONPATH``: this folder, unless ``datasets`` is installed."""
    return [] if importlib.util.find_spec("datasets") else [str(Path(__file__).parent)]
