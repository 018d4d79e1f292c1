"""What a forward's memory should be, from the layers' sizes: written down before it is measured.

R = tokens x top-k rows, H hidden size, I intermediate size per rank; all activations bfloat16. What is alive when is
what the engine's own code says (0.5.12.post1), with the Triton attention backend that the benchmarks' servers have. The
peak is the most of what the places of a forward hold, each written down by itself. In bytes:

- the Triton runner: its first GEMM's output (4IR) and the activation's (2IR), or the latter and the [tokens, top-k,
  hidden] tensor (2HR). FP8 in blocks adds each GEMM's quantized input, with a float32 scale for every 128 columns;
- Marlin: 2IR and the larger of 4I and 2H for each row;
- the router of GLM-4-MoE and MiniMax-M2: its input in float32 (4H for each token);
- attention, while the output projection runs: its input (or the residual), the residual, the projection's output,
  queries, keys and values in every form that a name still has, and what attention has put out;
- the first layer's MLP, where it is dense: gate and up, and the activation.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_moe_patches.changes.moe_workspace import columns, triton
from sglang_moe_patches.reference.families import (
    HEAD_DIM,
    KV_LORA_RANK,
    QK_NOPE_HEAD_DIM,
    QK_ROPE_HEAD_DIM,
    V_HEAD_DIM,
)

from common.shapes import Model, Rank

#: Scratch memory of the reference kernel for NVFP4 on a GPU.
REFERENCE_SCRATCH = 64 * 2**20
#: Of multi-head latent attention: the latents of keys and values, and their rotary part.
KV_LATENT = KV_LORA_RANK + QK_ROPE_HEAD_DIM
#: Columns of an FP8 tensor that share a scale.
FP8_GROUP = 128
#: The Triton attention backend's splits of a decode of latent attention: a power of 2, as many as a Hopper GPU has SMs.
DECODE_SPLITS = 256
PARTS = {
    "hidden": "hidden-size tensors",
    "attention": "q/kv latents of the attention inputs",
    "routing": "router logits, top-k ids and weights",
    "inputs": "FP4 activations and their scales",
    "released": "given back: attention's buffer of the decode before",
    "workspace": "while the runner works",
}
#: The name of the place that ``PARTS`` are of.
MOE = "the routed experts"


def as_the_engine_runs(model: Model, runner: str, *, fusion: bool = True) -> Model:
    """The model with its shared experts as routed ones, where the engine makes them so on a GPU.

    :param fusion: false with ``--disable-shared-experts-fusion``.
    """
    fusible = model.family == "glm4-moe" or (model.family == "deepseek-v3" and model.experts == 256)
    return model.fused() if fusion and fusible and runner == "triton" else model


@dataclass(frozen=True)
class Prediction:
    """Bytes beyond the state before a forward.

    :param hidden_tensors: how many tensors of [tokens, hidden], in a MoE layer that has one with a residual before it.
    :param parts: bytes of each of ``PARTS``, there.
    :param elsewhere: bytes at the other places that can be the peak.
    """

    hidden_tensors: int
    parts: dict[str, int]
    elsewhere: dict[str, int]

    @property
    def live(self) -> int:
        """When the runner starts."""
        return sum(self.parts.values()) - self.parts["workspace"]

    @property
    def places(self) -> dict[str, int]:
        """Bytes at every place that can be the peak."""
        return {MOE: sum(self.parts.values()), **self.elsewhere}

    @property
    def peak(self) -> int:
        return max(self.places.values())

    @property
    def where(self) -> str:
        """The place of the peak."""
        return max(self.places, key=self.places.__getitem__)


def predicted(
    model: Model,
    rank: Rank,
    runner: str,
    tokens: int,
    *,
    patched: bool,
    workspace: int = 0,
    quantization: str | None = None,
) -> Prediction:
    """A forward.

    Without the patches the residual, the layer's input (dead by then) and the MoE input are alive, the output of shared
    experts that run by themselves, q/kv latents, and an output that the NVFP4 kernel gets. With them, on DeepSeek's
    architecture, the shared experts run last and the latents are gone; the NVFP4 kernels, and Triton where the shared
    experts run last, write into the dead input. "Without" is a release up to 0.5.12.post1; later ones have an output
    buffer.

    :param model: with its shared experts as the engine runs them: ``fused()`` where it makes them routed ones.
    :param rank: its share, of tensor parallelism alone.
    :param runner: ``triton``, ``marlin`` or ``flashinfer_trtllm_routed``.
    :param workspace: bytes that the NVFP4 kernel is given besides (``--workspace-mb``).
    :param quantization: of Triton's experts: ``None`` (bfloat16) or ``fp8``, in blocks of 128 x 128.
    """
    mla = model.q_lora_rank is not None
    rows, size, inner = tokens * model.top_k, model.hidden, rank.intermediate
    share = model.shard(model.moe_intermediate // inner)
    hidden = 2 * tokens * size
    shared_last = patched and mla and bool(model.shared_experts)
    count = 3 + (bool(model.shared_experts) and not shared_last)
    # These models' routers compute in float32.
    in_float = model.family in ("glm4-moe", "minimax-m2")
    logits = (4 if in_float else 2) * tokens * model.experts
    latents = 2 * tokens * (model.q_lora_rank + KV_LATENT) if model.q_lora_rank is not None else 0
    held_latents = 0 if patched else latents
    released = -4 * share.heads * DECODE_SPLITS * KV_LORA_RANK if mla else 0

    inputs = 0
    if runner == "triton":
        held = triton_workspace(rank, tokens, patched=patched, inplace=not shared_last, fp8=quantization == "fp8")
    elif runner == "marlin":
        held = 2 * inner * rows + rows * max(4 * inner, 2 * size) + hidden
    else:
        held = workspace + REFERENCE_SCRATCH
        inputs = tokens * size // 2 + tokens * size // 16
        count += not patched  # its output
    parts = {
        "hidden": count * hidden,
        "attention": held_latents,
        "routing": logits + 8 * rows,
        "inputs": inputs,
        "released": released,
        "workspace": held,
    }
    elsewhere = {"attention": released + latents + attention(share, tokens)}
    if in_float:
        elsewhere["the router"] = (3 + bool(model.shared_experts)) * hidden + 4 * tokens * size + logits
    if model.dense_layers:
        elsewhere["the first layer's MLP"] = released + held_latents + 3 * hidden + 6 * tokens * share.intermediate
    return Prediction(count, parts, elsewhere)


def triton_workspace(rank: Rank, tokens: int, *, patched: bool, inplace: bool, fp8: bool) -> int:
    """Bytes that the Triton runner holds, at the most.

    With the patches the second GEMM runs for a range of columns at a time, and quantizes its input before that, which
    it then gives up. In place, the activation's output lies in the layer's dead input if that is large enough.

    :param inplace: its output lies in its input, not in the layer's dead input.
    """
    rows, size, inner = tokens * rank.top_k, rank.hidden, rank.intermediate
    activation, tensor = 2 * inner * rows, 2 * size * rows

    def quantized(elements: int) -> int:
        return elements + 4 * elements // FP8_GROUP if fp8 else 0

    first = 2 * activation + quantized(tokens * size)
    acts = tensor >= columns.SMALLEST_TENSOR_BYTES and triton.acts(tokens, rank.top_k, hooks=None, defer_sum=False)
    if not (patched and acts):
        return max(first, 3 * activation, activation + quantized(inner * rows) + tensor)
    in_dead_input = inplace and activation <= 2 * tokens * size
    scales = {"scale_columns": FP8_GROUP, "scale_bytes": 4 * (inner // FP8_GROUP)} if fp8 else {}
    width = columns.slice_width(
        tokens,
        rank.top_k,
        size,
        inner,
        2,
        activation_itemsize=1 if fp8 else 2,
        activation_elsewhere=in_dead_input,
        **scales,
    )
    own = 0 if in_dead_input else activation
    given = quantized(inner * rows) + (0 if fp8 and width < size else own)
    return max(first, 2 * activation + own, given + 2 * width * rows)


def attention(share: Model, tokens: int) -> int:
    """Bytes of the hidden-size tensors, and of attention's own tensors but for the latents of MLA.

    The Triton backend copies values that do not lie together, as those of MLA, which come with the keys in one tensor;
    the copy is gone when the output projection runs.

    :param share: a rank's share of the model.
    """
    hidden = 2 * tokens * share.hidden
    if share.q_lora_rank is not None:
        with_rotary = QK_NOPE_HEAD_DIM + QK_ROPE_HEAD_DIM
        # Queries, keys, keys and values without the rotary part, and the output.
        columns_of_head = 2 * with_rotary + QK_NOPE_HEAD_DIM + V_HEAD_DIM + V_HEAD_DIM
        own = 2 * tokens * share.heads * columns_of_head
        return 2 * hidden + own + max(hidden, 2 * tokens * share.heads * V_HEAD_DIM)
    # Queries, keys and values in one tensor, and the output; MiniMax-M2's norms of queries and keys are out of place.
    heads = 2 * share.heads + 2 * share.kv_heads
    if share.family == "minimax-m2":
        heads += share.heads + share.kv_heads
    return 3 * hidden + 2 * tokens * heads * HEAD_DIM
