"""DeepSeek-V3's architecture in plain PyTorch, to train the tiny model and to inspect its activations.

Parameters have the checkpoint's names, except that a layer's routed experts are stacked. Every token passes through all
routed experts. Experts to which the token is not routed have a weight of zero. At this size, two large matrix products
are faster than sorting tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from sglang_moe_reference import nvfp4
from sglang_moe_reference.model import ModelSpec, config
from torch import nn


def rope_table(settings: dict[str, Any], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute cosines and sines of DeepSeek's YaRN, as the engine does (``DeepseekScalingRotaryEmbedding``).

    :returns: two float32 tensors [length, qk_rope_head_dim / 2].
    """
    dim, base, yarn = settings["qk_rope_head_dim"], settings["rope_theta"], settings["rope_scaling"]

    def dimension_of(rotations: float) -> float:
        turns = yarn["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(base))

    low = max(math.floor(dimension_of(yarn["beta_fast"])), 0)
    high = min(math.ceil(dimension_of(yarn["beta_slow"])), dim - 1)
    period = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    frequency = 1.0 / (yarn["factor"] * period) * (1 - kept) + 1.0 / period * kept
    angle = torch.outer(torch.arange(length, dtype=torch.float32), frequency)
    magnitude = _magnitude(yarn["factor"], yarn["mscale"]) / _magnitude(yarn["factor"], yarn["mscale_all_dim"])
    return angle.cos() * magnitude, angle.sin() * magnitude


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of neighbouring elements, as DeepSeek does. (Other models rotate pairs of one element from each
    half.)

    :param x: [..., length, heads, dim].
    :param cos: [length, dim / 2].
    :param sin: [length, dim / 2].
    """
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)


class _RoundToNvfp4(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        multiplier = nvfp4.global_scale_for(x)
        return nvfp4.dequantize(*nvfp4.quantize(x, multiplier), 1 / multiplier).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def round_to_nvfp4(x: torch.Tensor) -> torch.Tensor:
    """Round a tensor to NVFP4. The gradient passes unchanged."""
    return _RoundToNvfp4.apply(x)


class Norm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.epsilon).to(x.dtype)


def linear(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(inputs))
    return layer


class Attention(nn.Module):
    """Multi-head latent attention."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.heads = settings["num_attention_heads"]
        self.latent, self.rope = settings["kv_lora_rank"], settings["qk_rope_head_dim"]
        self.nope, self.value = settings["qk_nope_head_dim"], settings["v_head_dim"]
        hidden, epsilon = settings["hidden_size"], settings["rms_norm_eps"]
        self.q_a_proj = linear(hidden, settings["q_lora_rank"])
        self.q_a_layernorm = Norm(settings["q_lora_rank"], epsilon)
        self.q_b_proj = linear(settings["q_lora_rank"], self.heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = linear(hidden, self.latent + self.rope)
        self.kv_a_layernorm = Norm(self.latent, epsilon)
        self.kv_b_proj = linear(self.latent, self.heads * (self.nope + self.value))
        self.o_proj = linear(self.heads * self.value, hidden, 1 / math.sqrt(2 * settings["num_hidden_layers"]))
        yarn = settings["rope_scaling"]
        self.scale = _magnitude(yarn["factor"], yarn["mscale_all_dim"]) ** 2 / math.sqrt(self.nope + self.rope)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(batch, length, self.heads, -1)
        q_nope, q_rope = q.split((self.nope, self.rope), dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((self.latent, self.rope), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, self.heads, -1)
        k_nope, v = kv.split((self.nope, self.value), dim=-1)
        k_rope = rotate(k_rope.unsqueeze(-2), cos, sin).expand(-1, -1, self.heads, -1)
        q = torch.cat((q_nope, rotate(q_rope, cos, sin)), dim=-1)
        k = torch.cat((k_nope, k_rope), dim=-1)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=self.scale
        )
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self, settings: dict[str, Any], intermediate: int) -> None:
        super().__init__()
        hidden = settings["hidden_size"]
        self.gate_proj = linear(hidden, intermediate)
        self.up_proj = linear(hidden, intermediate)
        self.down_proj = linear(intermediate, hidden, 1 / math.sqrt(2 * settings["num_hidden_layers"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """DeepSeek-V3's router. It chooses the best groups by sigmoid scores plus a bias, then the best experts in them.

    The weights of the experts are the scores without the bias.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.settings = settings
        self.weight = nn.Parameter(torch.randn(settings["n_routed_experts"], settings["hidden_size"]) * 0.02)
        self.register_buffer("e_score_correction_bias", torch.zeros(settings["n_routed_experts"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the weights of the experts, [tokens, experts]. Experts that are not chosen have a weight of zero."""
        settings = self.settings
        scores = F.linear(x, self.weight).float().sigmoid()
        choice = scores.detach() + self.e_score_correction_bias
        groups = choice.unflatten(-1, (settings["n_group"], -1))
        best = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1).topk(settings["topk_group"], dim=-1).indices
        allowed = torch.zeros_like(groups[..., 0]).scatter(-1, best, 1.0).unsqueeze(-1).expand_as(groups).flatten(-2)
        ids = choice.masked_fill(allowed == 0, -math.inf).topk(settings["num_experts_per_tok"], dim=-1).indices
        weights = scores.gather(-1, ids)
        weights = weights / weights.sum(-1, keepdim=True) * settings["routed_scaling_factor"]
        return torch.zeros_like(scores).scatter(-1, ids, weights)


class Experts(nn.Module):
    """Stacked routed experts of one layer."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner = settings["hidden_size"], settings["moe_intermediate_size"]
        count, depth = settings["n_routed_experts"], settings["num_hidden_layers"]
        self.gate_up = nn.Parameter(torch.randn(count, 2 * inner, hidden) / math.sqrt(hidden))
        self.down = nn.Parameter(torch.randn(count, hidden, inner) / math.sqrt(2 * depth * inner))
        self.quantized = False
        """Whether the experts' weights and activations are rounded to NVFP4."""

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate_up, down = self.gate_up, self.down
        if self.quantized:
            x, gate_up, down = round_to_nvfp4(x), round_to_nvfp4(gate_up), round_to_nvfp4(down)
        inner = F.linear(x, gate_up.flatten(0, 1)).unflatten(-1, gate_up.shape[:2])
        gate, up = inner.chunk(2, dim=-1)
        inner = F.silu(gate) * up
        if self.quantized:
            inner = round_to_nvfp4(inner)
        inner = inner * weights.to(inner.dtype).unsqueeze(-1)
        return F.linear(inner.flatten(-2), down.transpose(0, 1).flatten(1))


class Moe(nn.Module):
    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.gate = Gate(settings)
        self.experts = Experts(settings)
        self.shared_experts = Mlp(settings, settings["n_shared_experts"] * settings["moe_intermediate_size"])
        self.register_buffer("load", torch.zeros(settings["n_routed_experts"]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights = self.gate(tokens)
        self.load.copy_((weights.detach() > 0).sum(0))
        return self.experts(tokens, weights).view_as(x) + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, settings: dict[str, Any], index: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(settings["hidden_size"], settings["rms_norm_eps"])
        self.self_attn = Attention(settings)
        self.post_attention_layernorm = Norm(settings["hidden_size"], settings["rms_norm_eps"])
        dense = index < settings["first_k_dense_replace"]
        self.mlp = Mlp(settings, settings["intermediate_size"]) if dense else Moe(settings)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """The whole model, from token ids [batch, length] to logits [batch, length, vocabulary]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.settings = settings = config(spec)
        self.embed_tokens = nn.Embedding(settings["vocab_size"], settings["hidden_size"])
        self.layers = nn.ModuleList(Layer(settings, index) for index in range(settings["num_hidden_layers"]))
        self.norm = Norm(settings["hidden_size"], settings["rms_norm_eps"])
        self.lm_head = linear(settings["hidden_size"], settings["vocab_size"])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        cos, sin = (table.to(ids.device) for table in rope_table(self.settings, ids.shape[1]))
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))

    @property
    def moe_layers(self) -> list[Moe]:
        """MoE blocks of the model, in the order of their layers."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, Moe)]

    def quantize(self, on: bool) -> None:
        """Switch rounding to NVFP4 in the routed experts on or off."""
        for layer in self.moe_layers:
            layer.experts.quantized = on

    def balance(self, step: float) -> None:
        """Balance the experts' load as DeepSeek-V3 does, without a loss term.

        The bias of experts with too few tokens rises, and the bias of the other experts falls.
        """
        for layer in self.moe_layers:
            layer.gate.e_score_correction_bias += step * torch.sign(layer.load.mean() - layer.load)


def to_checkpoint(model: Model) -> dict[str, torch.Tensor]:
    """Convert the model's weights to those of a checkpoint: bfloat16 on the CPU, with the router's bias in float32."""
    weights = {}
    for name, tensor in model.state_dict().items():
        name = name if name.startswith("lm_head") else f"model.{name}"
        if name.endswith("e_score_correction_bias"):
            # Round the bias to bfloat16, because one of the engine's two TRT-LLM paths does so. Both paths must choose
            # the same experts.
            weights[name] = tensor.bfloat16().float().cpu()
        elif name.endswith(".experts.gate_up"):
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                weights[name.replace("gate_up", f"{expert}.gate_proj.weight")] = gate.bfloat16().cpu()
                weights[name.replace("gate_up", f"{expert}.up_proj.weight")] = up.bfloat16().cpu()
        elif name.endswith(".experts.down"):
            for expert, down in enumerate(tensor):
                weights[name.replace("down", f"{expert}.down_proj.weight")] = down.bfloat16().cpu()
        else:
            weights[name] = tensor.bfloat16().cpu()
    return {name: tensor.contiguous().clone() for name, tensor in weights.items()}


def from_checkpoint(spec: ModelSpec, weights: dict[str, torch.Tensor]) -> Model:
    """Load a checkpoint's weights into a float32 model; the inverse of :func:`to_checkpoint`."""
    model = Model(spec)
    state = {}
    for name in model.state_dict():
        source = name if name.startswith("lm_head") else f"model.{name}"
        if name.endswith((".experts.gate_up", ".experts.down")):
            prefix, kind = source.rsplit(".", 1)
            parts = ("gate_proj", "up_proj") if kind == "gate_up" else ("down_proj",)
            state[name] = torch.stack(
                [torch.cat([weights[f"{prefix}.{e}.{part}.weight"] for part in parts]) for e in range(spec.experts)]
            )
        else:
            state[name] = weights[source]
    model.load_state_dict(state)
    return model
