"""Families of models, by the engine's module with their layer stack.

There is no list of those that offer: the layers of the model that is being built are probed (:mod:`.probe`).
"""

DEEPSEEK = "deepseek_v2"
"""In this family shared experts can run last, and attention's inputs are dropped early."""
MODELS = "sglang.srt.models"
"""The engine's package of models."""
