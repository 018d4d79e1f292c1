"""Names of model families. A family is named like the engine's module that defines its decoder layers.

This package has no list of the families whose layers offer their dead input. Instead, :mod:`.probe` inspects the layers
of each model that is built.
"""

DEEPSEEK = "deepseek_v2"
"""Name of the family of DeepSeek V2 and of the models that reuse its layers, such as DeepSeek-R1 and Kimi-K2. Only
in this family, this package runs the shared experts after the routed experts, and frees attention's inputs early."""
MODELS = "sglang.srt.models"
"""Name of the engine's package that contains one module for each model family."""
