"""Sizes of a model, and of one rank's share of the model."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Layout:
    """Division of the MoE layers among ranks, by the engine's options.

    :param tp: ``--tp``: number of tensor-parallel ranks of a pipeline stage.
    :param ep: ``--ep``: number of groups into which the ranks are divided. Each group has its own experts, and the
        ranks of a group share each expert.
    :param dp: ``--dp`` with ``--enable-dp-attention``: number of data-parallel ranks among the ``tp`` ranks.
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
    """Sizes of one rank's share of a MoE layer.

    :param experts: number of experts whose weights the rank has.
    :param intermediate: columns of each expert's gate projection on the rank.
    """

    experts: int
    top_k: int
    hidden: int
    intermediate: int


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention (MLA), in columns. ``kv_rank`` is a size of the layer. The other sizes are
    for one head.

    :param kv_rank: columns of the latent of keys and values.
    :param rotary: columns of a query or key with a rotary embedding.
    :param plain: columns of a query or key without a rotary embedding.
    :param value: columns of a value.
    """

    kv_rank: int = 512
    rotary: int = 64
    plain: int = 128
    value: int = 128


@dataclass(frozen=True)
class Model:
    """Sizes of a mixture-of-experts model.

    :param source: Hugging Face repository whose ``config.json`` has these sizes.
    :param layers: number of decoder layers. The first ``dense_layers`` of them have no experts.
    :param experts: number of routed experts in a layer.
    :param top_k: number of routed experts to which a token is routed.
    :param moe_intermediate: intermediate size of one routed expert.
    :param shared_experts: number of shared experts in a layer that run separately from the routed experts, each with
        the intermediate size ``moe_intermediate``.
    :param intermediate: intermediate size of the dense layers' MLP; 0 if no layer is dense.
    :param heads: number of attention heads.
    :param kv_heads: number of key and value heads. With latent attention (MLA), this number equals ``heads``.
    :param groups: number of expert groups, and number of groups from which a token may choose.
    :param q_lora_rank: columns of the query's latent; ``None`` if attention is not MLA, or its queries have no latent.
    :param family: family of the model, a name in :data:`.config.FAMILIES`; empty if the model belongs to none of these
        families.
    :param head_dim: columns of a head, if attention is not MLA.
    :param latent: sizes of MLA.
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
    head_dim: int = 128
    latent: Latent = Latent()

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    def shard(self, ranks: int) -> Model:
        """Return a model with the sizes of one rank's share, for ``ranks`` tensor-parallel ranks.

        :raises ValueError: a size is not divisible by the number of ranks.
        """
        sizes = {name: getattr(self, name) for name in ("moe_intermediate", "intermediate", "heads")}
        for name, size in sizes.items():
            if size % ranks:
                raise ValueError(f"{self.source}: {name}={size} is not divisible by {ranks} ranks")
        shares = {name: size // ranks for name, size in sizes.items()}
        # If there are fewer key and value heads than ranks, several ranks have a copy of the same head.
        return replace(self, **shares, kv_heads=max(1, self.kv_heads // ranks))

    def per_rank(self, layout: Layout) -> Rank:
        """Return one rank's share of a MoE layer.

        :raises ValueError: the number of experts or the intermediate size is not divisible by the number of ranks.
        """
        sharing = layout.tp // layout.ep
        if self.experts % layout.ep:
            raise ValueError(f"{self.source}: {self.experts} experts are not divisible by ep={layout.ep}")
        if self.moe_intermediate % sharing:
            raise ValueError(
                f"{self.source}: the experts' intermediate size {self.moe_intermediate} is not divisible by "
                f"tp / ep = {sharing}"
            )
        return Rank(self.experts // layout.ep, self.top_k, self.hidden, self.moe_intermediate // sharing)
