"""What a command needs beyond what serving does: the package's extras."""

from __future__ import annotations

from importlib import util

EXTRAS = {
    "regress": ("regress", ("scipy", "psutil", "httpx", "jinja2")),
    "make-model": ("model", ("safetensors", "tokenizers")),
}
"""The extra that a command needs, and the modules that it brings."""


class Missing(RuntimeError):
    """An extra is not installed. The message says how to install it."""


def require(command: str) -> None:
    """:raises Missing: a module that the command needs is not there."""
    extra, modules = EXTRAS[command]
    if missing := [name for name in modules if util.find_spec(name) is None]:
        raise Missing(
            f"{command} needs {', '.join(missing)}: pip install '.[{extra}]' in a clone of sglang-moe-patches"
        )
