"""Stand-in for Hugging Face's ``datasets``. The engine imports it, but no benchmark downloads anything."""

from __future__ import annotations

from typing import Any


def load_dataset(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("`datasets` is not installed")
