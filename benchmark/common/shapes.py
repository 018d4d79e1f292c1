"""Layer sizes of the models in all benchmarks.

The sizes are those of each model's public ``config.json``. Tests compare them with ``doctor``'s copies of these files.
"""

from __future__ import annotations

from dataclasses import replace

from sglang_moe_patches.lab.predict.forward import MemoryEffects
from sglang_moe_patches.lab.predict.shapes import Layout, Model, Rank

__all__ = ["MODELS", "NVFP4_MODELS", "TINY", "TINY_MODELS", "Layout", "Model", "Rank"]


def fuse(model: Model) -> Model:
    """Return a copy of the model with its shared experts turned into routed experts that every token chooses.

    DeepSeek-V3 has 256 routed experts, one shared expert and a top-k of 8. Its copy has 257 routed experts, no shared
    expert and a top-k of 9.
    """
    experts, top_k = model.experts + model.shared_experts, model.top_k + model.shared_experts
    return replace(model, experts=experts, top_k=top_k, shared_experts=0)


def fuse_like_engine(model: Model, runner: str, *, fusion: bool = True) -> Model:
    """Return the model as the engine runs it on a GPU. With the Triton runner, the engine runs the shared experts of
    some models as routed experts (:func:`fuse`). Other models are returned unchanged.

    :param fusion: ``False`` with ``--disable-shared-experts-fusion``. The model is then unchanged.
    """
    fusible = model.family == "glm4-moe" or (model.family == "deepseek-v3" and model.experts == 256)
    return fuse(model) if fusion and fusible and runner == "triton" else model


def every_change(model: Model, columns: int | None = None) -> MemoryEffects:
    """Return the effects of all changes on the memory of a patched server's forward pass. The model's layers must be of
    a kind that offers its dead input to the MoE runner.

    :param columns: columns of a slice in the Triton or Marlin runner; ``None``: the runner's tensor is not cut.
    """
    latent = model.q_lora_rank is not None
    return MemoryEffects(latent, latent and bool(model.shared_experts), True, columns)


_DEEPSEEK_V3 = Model("deepseek-ai/DeepSeek-V3", 61, 3, 7168, 256, 8, 2048, 1, 18432, 128, 128, (8, 4), 1536)

MODELS = {
    "kimi-k2.5": Model("moonshotai/Kimi-K2.5", 61, 1, 7168, 384, 8, 2048, 1, 18432, 64, 64, (1, 1), 1536),
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-v3-fused": fuse(_DEEPSEEK_V3),
    "glm-4.5": Model("zai-org/GLM-4.5", 92, 3, 5120, 160, 8, 1536, 1, 12288, 96, 8, family="glm4-moe"),
    "qwen3-235b": Model("Qwen/Qwen3-235B-A22B", 94, 0, 4096, 128, 8, 1536, 0, 0, 64, 4, family="qwen3-moe"),
    "qwen3-30b": Model("Qwen/Qwen3-30B-A3B", 48, 0, 2048, 128, 8, 768, 0, 0, 32, 4, family="qwen3-moe"),
    "minimax-m2": Model("MiniMaxAI/MiniMax-M2", 62, 0, 3072, 256, 8, 1536, 0, 0, 48, 8, family="minimax-m2"),
    "mixtral-8x7b": Model("mistralai/Mixtral-8x7B-v0.1", 32, 0, 4096, 8, 2, 14336, 0, 0, 32, 8, family=""),
}

TINY = Model("", 4, 1, 256, 8, 2, 256, 1, 512, 4, 4, (4, 2), 128)
"""DeepSeek model that is small enough for the reference kernels on a CPU."""

TINY_MODELS = {
    "tiny": TINY,
    "tiny-qwen3-moe": Model("", 4, 0, 256, 8, 2, 256, 0, 0, 4, 2, family="qwen3-moe"),
    "tiny-glm4-moe": Model("", 4, 1, 256, 8, 2, 256, 1, 512, 4, 2, family="glm4-moe"),
    "tiny-minimax-m2": Model("", 4, 0, 256, 8, 2, 256, 0, 0, 4, 2, family="minimax-m2"),
}
"""Small models, one of each family."""

NVFP4_MODELS = ("kimi-k2.5", "deepseek-v3", "qwen3-235b")
"""Default models of the benchmarks of NVFP4 experts with the TRT-LLM and CuteDSL runners."""
