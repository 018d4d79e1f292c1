"""What a forward's memory should be, from the layers' sizes: written down before it is measured.

R = tokens x top-k rows, H hidden size, I intermediate size per rank; all activations bfloat16. The workspaces are those
of the engine's own code (0.5.12.post1): the Triton runner frees its first GEMM's output (4IR bytes) before it makes the
[tokens, top-k, hidden] tensor (2HR); Marlin holds 2IR and the larger of 4I and 2H for each row.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.shapes import Model, Rank

#: Scratch memory of the reference kernel for NVFP4 on a GPU.
REFERENCE_SCRATCH = 64 * 2**20
#: Of multi-head latent attention: the latents of keys and values, and their rotary part.
KV_LATENT = 512 + 64
PARTS = {
    "hidden": "hidden-size tensors",
    "attention": "q/kv latents of the attention inputs",
    "routing": "router logits, top-k ids and weights",
    "inputs": "FP4 activations and their scales",
    "workspace": "while the runner works",
}


def as_the_engine_runs(model: Model, runner: str, *, fusion: bool = True) -> Model:
    """The model with its shared experts as routed ones, where the engine makes them so on a GPU.

    :param fusion: false with ``--disable-shared-experts-fusion``.
    """
    fusible = model.family == "glm4-moe" or (model.family == "deepseek-v3" and model.experts == 256)
    return model.fused() if fusion and fusible and runner == "triton" else model


@dataclass(frozen=True)
class Prediction:
    """Bytes beyond the state before a forward, in a MoE layer that has one with a residual before it.

    :param hidden_tensors: how many tensors of [tokens, hidden].
    :param parts: bytes of each of ``PARTS``.
    """

    hidden_tensors: int
    parts: dict[str, int]

    @property
    def live(self) -> int:
        """When the runner starts."""
        return self.peak - self.parts["workspace"]

    @property
    def peak(self) -> int:
        """While it works; another place of the forward can need more."""
        return sum(self.parts.values())


def predicted(model: Model, rank: Rank, runner: str, tokens: int, *, patched: bool, workspace: int = 0) -> Prediction:
    """A forward of a MoE layer.

    Without the patches the residual, the layer's input (dead by then) and the MoE input are alive, the output of shared
    experts that run by themselves, q/kv latents, and an output that the NVFP4 kernel gets. With them, on DeepSeek's
    architecture, the shared experts run last and the latents are gone; the NVFP4 kernels, and Triton where the shared
    experts run last, write into the dead input. Triton's second GEMM runs for as many columns at a time as fit into
    what its first one has given back. "Without" is a release up to 0.5.12.post1; later ones have an output buffer.

    :param model: with its shared experts as the engine runs them: ``fused()`` where it makes them routed ones.
    :param rank: its share.
    :param runner: ``triton`` (BF16), ``marlin`` or ``flashinfer_trtllm_routed``.
    :param workspace: bytes that the NVFP4 kernel is given besides (``--workspace-mb``).
    """
    rows, size, inner = tokens * model.top_k, model.hidden, rank.intermediate
    hidden = 3
    if model.shared_experts and not (patched and model.q_lora_rank is not None):
        hidden += 1
    # These models' routers compute in float32.
    logit = 4 if model.family in ("glm4-moe", "minimax-m2") else 2
    inputs = 0
    latents = 0 if patched or model.q_lora_rank is None else 2 * tokens * (model.q_lora_rank + KV_LATENT)
    if runner == "triton":
        gemms = 6 * inner * rows
        held = gemms if patched else max(gemms, 2 * inner * rows + 2 * size * rows)
    elif runner == "marlin":
        held = 2 * inner * rows + rows * max(4 * inner, 2 * size) + 2 * size * tokens
    else:
        held = workspace + REFERENCE_SCRATCH
        inputs = tokens * size // 2 + tokens * size // 16
        hidden += not patched  # its output
    return Prediction(
        hidden,
        {
            "hidden": hidden * 2 * tokens * size,
            "attention": latents,
            "routing": logit * tokens * model.experts + 8 * rows,
            "inputs": inputs,
            "workspace": held,
        },
    )
