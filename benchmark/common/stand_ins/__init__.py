"""Stand-ins for packages that the engine's client and tests import. They use these packages only for downloads."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def folders() -> list[str]:
    """Folders to add to ``PYTHONPATH``: this folder, unless ``datasets`` is installed."""
    return [] if importlib.util.find_spec("datasets") else [str(Path(__file__).parent)]
