"""The families of models whose decoder layers have a dead input."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Models whose decoder layers have a dead input.

    :param models: what they are called.
    :param name: of the module with the layer.
    :param layer: the decoder layer's class.
    :param model: module and class of the layer stack, whose ``forward`` has the loop over the layers.
    :param block: the layer's attribute with the MoE block, whose ``experts`` are the routed ones.
    """

    models: str
    name: str
    layer: str
    model: tuple[str, str]
    block: str = "mlp"


LOOKS_AT = (
    (
        "`models/`, each family's decoder layer and the loop over the layers (`dead_input/families.py`)",
        "is the layer's input still given up with its first norm? does the loop keep it? where is the residual "
        "(argument, `forward_batch.residual_stream`)? is there a layer of a new kind?",
    ),
)
"""As a change's ``looks_at``."""
DEEPSEEK = "deepseek_v2"
"""The family whose shared experts can run last, and whose attention inputs are held."""
FAMILIES = (
    Family("DeepSeek-V2/V3", DEEPSEEK, "DeepseekV2DecoderLayer", (DEEPSEEK, "DeepseekV2Model")),
    Family("Qwen2-MoE", "qwen2_moe", "Qwen2MoeDecoderLayer", ("qwen2_moe", "Qwen2MoeModel")),
    Family("Qwen3-MoE", "qwen3_moe", "Qwen3MoeDecoderLayer", ("qwen2_moe", "Qwen2MoeModel")),
    Family("GLM-4-MoE", "glm4_moe", "Glm4MoeDecoderLayer", ("glm4_moe", "Glm4MoeModel")),
    Family(
        "MiniMax-M2", "minimax_m2", "MiniMaxM2DecoderLayer", ("minimax_m2", "MiniMaxM2Model"), block="block_sparse_moe"
    ),
    Family("GLM-5-Next", "glm5_next", "Glm5NextDecoderLayer", ("glm5_next", "Glm5NextModel")),
)
