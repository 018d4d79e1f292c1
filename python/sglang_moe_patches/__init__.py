"""Memory and correctness patches for SGLang's mixture-of-experts layers.

Installing this package is enough: the engine calls :func:`sglang_moe_patches.plugin.register` in every process
through its ``sglang.srt.plugins`` entry point. Nothing is imported here, so that the launcher stays small.
"""

__version__ = "0.5.0"
