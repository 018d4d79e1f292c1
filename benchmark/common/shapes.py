"""Sizes of the models that figures are about: one table for all benchmarks.

The figures are those of each model's public ``config.json``, named by its Hugging Face repository; tests compare them
with doctor's copies of these files.
"""

from __future__ import annotations

from sglang_moe_patches.lab.predict.shapes import Layout, Model, Rank

__all__ = ["MODELS", "NVFP4_MODELS", "TINY", "TINY_MODELS", "Layout", "Model", "Rank"]


_DEEPSEEK_V3 = Model("deepseek-ai/DeepSeek-V3", 61, 3, 7168, 256, 8, 2048, 1, 18432, 128, 128, (8, 4), 1536)

MODELS = {
    "kimi-k2.5": Model("moonshotai/Kimi-K2.5", 61, 1, 7168, 384, 8, 2048, 1, 18432, 64, 64, (1, 1), 1536),
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-v3-fused": _DEEPSEEK_V3.fused(),
    "glm-4.5": Model("zai-org/GLM-4.5", 92, 3, 5120, 160, 8, 1536, 1, 12288, 96, 8, family="glm4-moe"),
    "qwen3-235b": Model("Qwen/Qwen3-235B-A22B", 94, 0, 4096, 128, 8, 1536, 0, 0, 64, 4, family="qwen3-moe"),
    "qwen3-30b": Model("Qwen/Qwen3-30B-A3B", 48, 0, 2048, 128, 8, 768, 0, 0, 32, 4, family="qwen3-moe"),
    "minimax-m2": Model("MiniMaxAI/MiniMax-M2", 62, 0, 3072, 256, 8, 1536, 0, 0, 48, 8, family="minimax-m2"),
    "mixtral-8x7b": Model("mistralai/Mixtral-8x7B-v0.1", 32, 0, 4096, 8, 2, 14336, 0, 0, 32, 8, family=""),
}

#: A DeepSeek model small enough for the reference kernels on a CPU.
TINY = Model("", 4, 1, 256, 8, 2, 256, 1, 512, 4, 4, (4, 2), 128)

#: The same for the other families.
TINY_MODELS = {
    "tiny": TINY,
    "tiny-qwen3-moe": Model("", 4, 0, 256, 8, 2, 256, 0, 0, 4, 2, family="qwen3-moe"),
    "tiny-glm4-moe": Model("", 4, 1, 256, 8, 2, 256, 1, 512, 4, 2, family="glm4-moe"),
    "tiny-minimax-m2": Model("", 4, 0, 256, 8, 2, 256, 0, 0, 4, 2, family="minimax-m2"),
}

#: The models whose NVFP4 checkpoints the TRT-LLM and CuteDSL figures are about.
NVFP4_MODELS = ("kimi-k2.5", "deepseek-v3", "qwen3-235b")
