"""Memory and correctness patches for SGLang's mixture-of-experts layers.

Installing this package is enough. The engine calls :func:`sglang_moe_patches.plugin.register` in each of its processes,
through the entry point ``sglang.srt.plugins``. This module imports nothing, so that the launcher stays small.
"""

__version__ = "0.5.0"
