"""Sizes of the models that figures are about: one table for all benchmarks.

The figures are those of each model's public ``config.json``, named by its Hugging Face repository. They were compared
with copies of these files and with the defaults of ``transformers``' configurations (DeepSeek-V3, MiniMax-M2, Mixtral);
a test compares the latter again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Layout:
    """How the MoE layers are spread over ranks, in the engine's words.

    :param tp: ``--tp``: tensor-parallel ranks.
    :param ep: ``--ep``: expert-parallel ranks among them; the others share each expert.
    :param dp: ``--dp`` with ``--enable-dp-attention``: data-parallel ranks among them.
    """

    tp: int = 1
    ep: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for name, size in (("ep", self.ep), ("dp", self.dp)):
            if self.tp % size:
                raise ValueError(f"{name} must divide tp, got {name}={size} and tp={self.tp}")


@dataclass(frozen=True)
class Rank:
    """One rank's share of a MoE layer.

    :param experts: experts whose weights it holds.
    :param intermediate: columns of each expert's gate projection that it holds.
    """

    experts: int
    top_k: int
    hidden: int
    intermediate: int


@dataclass(frozen=True)
class Model:
    """A mixture-of-experts model.

    :param source: Hugging Face repository whose ``config.json`` has these figures.
    :param layers: decoder layers, the ``dense_layers`` first ones without experts.
    :param experts: routed experts of a layer.
    :param top_k: routed experts of a token.
    :param moe_intermediate: intermediate size of one routed expert.
    :param shared_experts: shared experts of a layer that run by themselves, each of ``moe_intermediate``.
    :param intermediate: of the dense layers' MLP; 0 where no layer is dense.
    :param heads: attention heads.
    :param kv_heads: key and value heads; as many as ``heads`` where attention is latent (MLA).
    :param groups: expert groups, and groups that a token may choose from.
    :param q_lora_rank: rank of the query's latent; ``None``: not MLA.
    :param family: its architecture, as ``make-model --family`` names it; "": none of those.
    """

    source: str
    layers: int
    dense_layers: int
    hidden: int
    experts: int
    top_k: int
    moe_intermediate: int
    shared_experts: int
    intermediate: int
    heads: int
    kv_heads: int
    groups: tuple[int, int] = (1, 1)
    q_lora_rank: int | None = None
    family: str = "deepseek-v3"

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    def fused(self) -> Model:
        """The same with its shared experts run as routed ones that every token chooses, as the engine can."""
        return replace(
            self,
            experts=self.experts + self.shared_experts,
            top_k=self.top_k + self.shared_experts,
            shared_experts=0,
        )

    def shard(self, ranks: int) -> Model:
        """As if one rank's share of ``ranks`` were the whole model, for one GPU.

        :raises ValueError: a size does not divide by the ranks.
        """
        sizes = {name: getattr(self, name) for name in ("moe_intermediate", "intermediate", "heads")}
        for name, size in sizes.items():
            if size % ranks:
                raise ValueError(f"{self.source}: {name} {size} does not divide by {ranks}")
        shares = {name: size // ranks for name, size in sizes.items()}
        # Where there are fewer heads of keys and values than ranks, several ranks have the same.
        return replace(self, **shares, kv_heads=max(1, self.kv_heads // ranks))

    def per_rank(self, layout: Layout) -> Rank:
        """One rank's share of a layer.

        :raises ValueError: experts or intermediate size do not divide by the ranks.
        """
        sharing = layout.tp // layout.ep
        if self.experts % layout.ep or self.moe_intermediate % sharing:
            raise ValueError(
                f"{self.source}: {self.experts} experts of intermediate size {self.moe_intermediate} do not divide by "
                f"tp={layout.tp}, ep={layout.ep}"
            )
        return Rank(self.experts // layout.ep, self.top_k, self.hidden, self.moe_intermediate // sharing)


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
