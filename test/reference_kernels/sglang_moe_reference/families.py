"""Model families of the tiny checkpoints: their configuration and the names and shapes of their tensors.

A family is data: its names in config.json, its names in the checkpoint, and its parts. The families are those of
DeepSeek-V3, Qwen3-235B-A22B, GLM-4.5 and MiniMax-M2, as the engine's model classes read their checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

# Attention sizes with which the engine is known to work. They have no options of their own.
KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
QK_NOPE_HEAD_DIM = 128
V_HEAD_DIM = 128
HEAD_DIM = 128
"""Head dimension of the families without multi-head latent attention."""

ROUTED_SCALING_FACTOR = 2.5

ROW_MULTIPLE = 128
"""Every weight's number of rows must be a multiple of this number. The TRT-LLM kernel's layout of block scales requires
it."""

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

Kind = Literal["linear", "norm", "embedding", "bias", "correction bias"]


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint before quantization.

    :param name: name in the checkpoint. A linear layer's name lacks its ``.weight`` or ``.bias``.
    :param shape: for a linear layer [out_features, in_features].
    :param expert: whether the tensor is a projection of a routed expert in the main model. Quantization makes these
        tensors NVFP4.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    expert: bool = False

    @property
    def key(self) -> str:
        """Name of the tensor in the checkpoint, with its suffix."""
        return self.name + {"bias": ".bias", "correction bias": ""}.get(self.kind, ".weight")


@dataclass(frozen=True)
class Family:
    """Description of a model family.

    :param architecture: name of the engine's model class.
    :param layers: engine module with the decoder layer, below ``sglang.srt.models``.
    :param config: keys of config.json, in addition to the keys that every family has.
    :param attention: tensors of a layer's attention, by their names below ``self_attn.``.
    :param moe: name of a layer's MoE block.
    :param correction_bias: name of the router's bias in the MoE block; ``None``: there is no bias.
    :param projections: names of an expert's gate, up and down projection.
    :param dense_layers: default number of leading dense layers; ``None``: the family cannot have any.
    :param shared_experts: default number of shared experts; ``None``: the family cannot have any.
    :param nextn: whether a NextN layer can be written.
    """

    architecture: str
    model_type: str
    layers: str
    config: Callable[[ModelSpec], dict[str, Any]]
    attention: Callable[[ModelSpec], Iterator[Tensor]]
    moe: str = "mlp"
    correction_bias: str | None = "gate.e_score_correction_bias"
    projections: tuple[str, str, str] = PROJECTIONS
    dense_layers: int | None = None
    shared_experts: int | None = None
    nextn: bool = False
    latent_attention: bool = False


def _latent_attention(spec: ModelSpec) -> Iterator[Tensor]:
    hidden, heads, q_lora_rank = spec.hidden, spec.heads, spec.q_lora_rank
    yield Tensor("q_a_proj", (q_lora_rank, hidden), "linear")
    yield Tensor("q_a_layernorm", (q_lora_rank,), "norm")
    yield Tensor("q_b_proj", (heads * (QK_NOPE_HEAD_DIM + QK_ROPE_HEAD_DIM), q_lora_rank), "linear")
    yield Tensor("kv_a_proj_with_mqa", (KV_LORA_RANK + QK_ROPE_HEAD_DIM, hidden), "linear")
    yield Tensor("kv_a_layernorm", (KV_LORA_RANK,), "norm")
    yield Tensor("kv_b_proj", (heads * (QK_NOPE_HEAD_DIM + V_HEAD_DIM), KV_LORA_RANK), "linear")
    yield Tensor("o_proj", (hidden, heads * V_HEAD_DIM), "linear")


def _grouped_attention(*, bias: bool = False, norm_of_all_heads: bool = False) -> Callable[..., Iterator[Tensor]]:
    """Return the tensors of grouped-query attention with normalised queries and keys.

    :param bias: whether queries, keys and values have biases.
    :param norm_of_all_heads: whether a norm covers all heads of a token. Otherwise it covers each head separately.
    """

    def tensors(spec: ModelSpec) -> Iterator[Tensor]:
        heads = {"q": spec.heads, "k": spec.kv_heads, "v": spec.kv_heads}
        for name, count in heads.items():
            yield Tensor(f"{name}_proj", (count * HEAD_DIM, spec.hidden), "linear")
            if bias:
                yield Tensor(f"{name}_proj", (count * HEAD_DIM,), "bias")
            if name != "v":
                yield Tensor(f"{name}_norm", ((count if norm_of_all_heads else 1) * HEAD_DIM,), "norm")
        yield Tensor("o_proj", (spec.hidden, spec.heads * HEAD_DIM), "linear")

    return tensors


def _deepseek_v3(spec: ModelSpec) -> dict[str, Any]:
    n_group, topk_group = spec.expert_groups
    return {
        "intermediate_size": spec.intermediate,
        "num_nextn_predict_layers": int(spec.nextn),
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": spec.max_position // 2,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "attention_bias": False,
        "q_lora_rank": spec.q_lora_rank,
        "kv_lora_rank": KV_LORA_RANK,
        "qk_nope_head_dim": QK_NOPE_HEAD_DIM,
        "qk_rope_head_dim": QK_ROPE_HEAD_DIM,
        "v_head_dim": V_HEAD_DIM,
        "first_k_dense_replace": spec.dense_layers,
        "moe_layer_freq": 1,
        "moe_intermediate_size": spec.moe_intermediate,
        "n_routed_experts": spec.experts,
        "n_shared_experts": spec.shared_experts,
        "n_group": n_group,
        "topk_group": topk_group,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": ROUTED_SCALING_FACTOR,
    }


def _qwen3_moe(spec: ModelSpec) -> dict[str, Any]:
    return {
        "intermediate_size": spec.intermediate,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "head_dim": HEAD_DIM,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": spec.moe_intermediate,
        "num_experts": spec.experts,
        "norm_topk_prob": True,
        "use_sliding_window": False,
    }


def _glm4_moe(spec: ModelSpec) -> dict[str, Any]:
    return {
        "intermediate_size": spec.intermediate,
        "num_nextn_predict_layers": 0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "head_dim": HEAD_DIM,
        "use_qk_norm": True,
        "first_k_dense_replace": spec.dense_layers,
        "moe_intermediate_size": spec.moe_intermediate,
        "n_routed_experts": spec.experts,
        "n_shared_experts": spec.shared_experts,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": ROUTED_SCALING_FACTOR,
    }


def _minimax_m2(spec: ModelSpec) -> dict[str, Any]:
    return {
        "intermediate_size": spec.moe_intermediate,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000.0,
        "head_dim": HEAD_DIM,
        "rotary_dim": HEAD_DIM // 2,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "num_local_experts": spec.experts,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "num_mtp_modules": 0,
        "attn_type_list": [1] * spec.layers,
    }


FAMILIES = {
    "deepseek-v3": Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        "deepseek_v2",
        _deepseek_v3,
        _latent_attention,
        dense_layers=1,
        shared_experts=1,
        nextn=True,
        latent_attention=True,
    ),
    "qwen3-moe": Family(
        "Qwen3MoeForCausalLM", "qwen3_moe", "qwen3_moe", _qwen3_moe, _grouped_attention(), correction_bias=None
    ),
    "glm4-moe": Family(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        "glm4_moe",
        _glm4_moe,
        _grouped_attention(bias=True),
        dense_layers=1,
        shared_experts=1,
    ),
    "minimax-m2": Family(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        "minimax_m2",
        _minimax_m2,
        _grouped_attention(norm_of_all_heads=True),
        moe="block_sparse_moe",
        correction_bias="e_score_correction_bias",
        projections=("w1", "w3", "w2"),
    ),
}


def _require(condition: bool, field: str, rule: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{field} must be {rule}, got {value!r}")


OF_FAMILY: Any = None
"""Placeholder for a default that depends on other fields of :class:`ModelSpec`, such as the model family.
:class:`ModelSpec` replaces the placeholder by the default."""


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of the tiny model. The defaults make a checkpoint of about 11 MB.

    :raises ValueError: a field breaks a rule. The message names the field and the rule.
    """

    layers: int = 4
    """Number of decoder layers, not counting the NextN layer."""
    dense_layers: int = OF_FAMILY
    """Number of leading layers with a dense MLP instead of experts (``first_k_dense_replace``). Default: 1 if the
    family has such layers, else 0.
    """
    experts: int = 8
    """Number of routed experts in each MoE layer."""
    top_k: int = 2
    """Number of routed experts that compute each token."""
    hidden: int = 256
    moe_intermediate: int = 128
    heads: int = 4
    shared_experts: int = OF_FAMILY
    """Number of shared experts. Default: 1 if the family has shared experts, else 0."""
    seed: int = 0
    nextn: bool = False
    """Whether to also write a NextN layer, for speculative decoding."""
    max_position: int = 8192
    """Longest sequence in tokens."""
    family: str = "deepseek-v3"
    """Model family, a key of ``FAMILIES``."""
    kv_heads: int = OF_FAMILY
    """Number of heads of keys and values. Default: as many as ``heads`` in families with latent attention, else half
    as many.
    """
    intermediate: int = OF_FAMILY
    """Intermediate size of the dense layers. Default: twice ``hidden``."""
    q_lora_rank: int = 128
    """Rank of the queries' latent, in families with latent attention."""

    def __post_init__(self) -> None:
        _require(self.family in FAMILIES, "family", f"one of {', '.join(FAMILIES)}", self.family)
        family = FAMILIES[self.family]
        for field, default in {
            "dense_layers": min(family.dense_layers or 0, self.layers),
            "shared_experts": family.shared_experts or 0,
            "kv_heads": self.heads if family.latent_attention else max(1, self.heads // 2),
            "intermediate": 2 * self.hidden,
        }.items():
            if getattr(self, field) is OF_FAMILY:
                object.__setattr__(self, field, default)
        for field, value in asdict(self).items():
            if field != "family":
                kind = bool if field == "nextn" else int
                _require(type(value) is kind, field, "true or false" if kind is bool else "an integer", value)
        limits = {
            "layers": 1,
            "experts": 2,
            "heads": 1,
            "kv_heads": 1,
            "q_lora_rank": 1,
            "shared_experts": 0,
            "seed": 0,
        }
        for field, least in limits.items():
            _require(getattr(self, field) >= least, field, f"at least {least}", getattr(self, field))
        for field in ("hidden", "moe_intermediate", "intermediate"):
            value = getattr(self, field)
            _require(value > 0 and value % ROW_MULTIPLE == 0, field, f"a positive multiple of {ROW_MULTIPLE}", value)
        for field in ("dense_layers", "shared_experts"):
            value = getattr(self, field)
            _require(getattr(family, field) is not None or value == 0, field, f"0 for {self.family}", value)
        same_heads = self.kv_heads == self.heads or not family.latent_attention
        for field, holds, rule in (
            ("dense_layers", 0 <= self.dense_layers <= self.layers, f"0 to layers ({self.layers})"),
            ("top_k", 1 <= self.top_k <= self.experts, f"1 to experts ({self.experts})"),
            ("kv_heads", self.heads % self.kv_heads == 0, f"a divisor of heads ({self.heads})"),
            ("kv_heads", same_heads, f"heads ({self.heads}) for {self.family}"),
            ("max_position", self.max_position >= 256 and self.max_position % 2 == 0, "even and at least 256"),
            ("nextn", family.nextn or not self.nextn, f"false for {self.family}"),
            # If the model has one layer, the engine expects the NextN weights under layer 0. The main model's weights
            # are there already.
            ("nextn", self.layers >= 2 or not self.nextn, "false when there is one layer"),
        ):
            _require(holds, field, rule, getattr(self, field))

    @property
    def expert_groups(self) -> tuple[int, int]:
        """Numbers of groups in DeepSeek-V3's grouped routing: (n_group, topk_group).

        A group's score is the sum of its two best experts' scores, so a group needs at least two experts. The chosen
        groups together need at least top_k experts.
        """
        grouped = self.experts % 4 == 0 and self.experts >= 8 and self.experts // 2 >= self.top_k
        return (4, 2) if grouped else (1, 1)


def expert_prefix(spec: ModelSpec, layer: int, expert: int) -> str:
    """Return the beginning of the names of a routed expert's tensors."""
    return f"model.layers.{layer}.{FAMILIES[spec.family].moe}.experts.{expert}"


def tensors(spec: ModelSpec, vocabulary: int) -> Iterator[Tensor]:
    """Yield all tensors of the model before quantization.

    :param vocabulary: number of tokens.
    """
    family = FAMILIES[spec.family]
    hidden = spec.hidden

    def mlp(
        prefix: str, intermediate: int, names: tuple[str, ...] = PROJECTIONS, expert: bool = False
    ) -> Iterator[Tensor]:
        shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
        for name, shape in zip(names, shapes, strict=True):
            yield Tensor(f"{prefix}.{name}", shape, "linear", expert)

    yield Tensor("model.embed_tokens", (vocabulary, hidden), "embedding")
    yield Tensor("model.norm", (hidden,), "norm")
    yield Tensor("lm_head", (vocabulary, hidden), "linear")
    for layer in range(spec.layers + spec.nextn):
        prefix = f"model.layers.{layer}"
        yield Tensor(f"{prefix}.input_layernorm", (hidden,), "norm")
        yield Tensor(f"{prefix}.post_attention_layernorm", (hidden,), "norm")
        for tensor in family.attention(spec):
            yield Tensor(f"{prefix}.self_attn.{tensor.name}", tensor.shape, tensor.kind)
        if layer < spec.dense_layers:
            yield from mlp(f"{prefix}.mlp", spec.intermediate)
            continue
        moe = f"{prefix}.{family.moe}"
        yield Tensor(f"{moe}.gate", (spec.experts, hidden), "linear")
        if family.correction_bias:
            yield Tensor(f"{moe}.{family.correction_bias}", (spec.experts,), "correction bias")
        for expert in range(spec.experts):
            prefix_of_expert = expert_prefix(spec, layer, expert)
            yield from mlp(prefix_of_expert, spec.moe_intermediate, family.projections, expert=layer < spec.layers)
        if spec.shared_experts:
            yield from mlp(f"{moe}.shared_experts", spec.shared_experts * spec.moe_intermediate)
    if spec.nextn:
        prefix = f"model.layers.{spec.layers}"
        yield Tensor(f"{prefix}.enorm", (hidden,), "norm")
        yield Tensor(f"{prefix}.hnorm", (hidden,), "norm")
        yield Tensor(f"{prefix}.eh_proj", (hidden, 2 * hidden), "linear")
        yield Tensor(f"{prefix}.shared_head.norm", (hidden,), "norm")
        # The NextN layer uses the embedding and the head of the main model. The engine shares them.
