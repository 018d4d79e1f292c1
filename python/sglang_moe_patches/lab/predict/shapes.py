"""The sizes of a model, and of one rank's share of it."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Layout:
    """Layout of the MoE layers over ranks, in the engine's words.

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

    :param experts: experts whose weights the rank holds.
    :param intermediate: columns of each expert's gate projection that it holds.
    """

    experts: int
    top_k: int
    hidden: int
    intermediate: int


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention, of one head but for the latents.

    :param kv_rank: latent of keys and values.
    :param rotary: rotary part of a query's or key's columns.
    :param plain: the other part.
    :param value: columns of a value.
    """

    kv_rank: int = 512
    rotary: int = 64
    plain: int = 128
    value: int = 128


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
    :param family: its architecture, as :data:`.config.FAMILIES` names it; "": none of those.
    :param head_dim: columns of a head, where attention is not latent.
    :param latent: the same where it is.
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
        """Model of the sizes of one rank's share of ``ranks``, for one GPU.

        :raises ValueError: a size does not divide by the ranks.
        """
        sizes = {name: getattr(self, name) for name in ("moe_intermediate", "intermediate", "heads")}
        for name, size in sizes.items():
            if size % ranks:
                raise ValueError(f"{self.source}: {name} {size} does not divide by {ranks}")
        shares = {name: size // ranks for name, size in sizes.items()}
        # If there are fewer heads of keys and values than ranks, several ranks have the same head.
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
