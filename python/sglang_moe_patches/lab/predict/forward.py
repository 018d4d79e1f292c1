"""Memory of a forward pass, predicted from the layers' sizes: pure functions, all results in bytes.

R = tokens x top-k rows, H hidden size, I intermediate size per rank; all activations are bfloat16. The lifetimes of
tensors follow the engine's code (0.5.12.post1) with the Triton attention backend of the benchmarks' servers. The
peak is the largest sum over the places of a forward pass. In bytes:

- the Triton runner: its first GEMM's output (4IR) and the activation's (2IR), or the latter and the [tokens, top-k,
  hidden] tensor (2HR). FP8 in blocks adds each GEMM's quantized input, with a float32 scale for every 128 columns;
- Marlin: 2IR and the larger of 4I and 2H for each row, and its output; in columns 6IR, or 2IR, the output, and for each
  column of a range 2R and its weights;
- the router of GLM-4-MoE and MiniMax-M2: its input in float32 (4H for each token);
- attention, while the output projection runs: its input (or the residual), the residual, the projection's output,
  queries, keys and values in every form that a name still has, and what attention has put out;
- the first layer's MLP, where it is dense: gate and up, and the activation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_moe_patches.core import runners
from sglang_moe_patches.lab.predict.shapes import Layout, Model, Rank

#: Columns of an FP8 tensor that share a scale.
FP8_GROUP = 128
BLOCKS = "fp8"
"""Weights in blocks of 128 x 128."""
SCALED = {BLOCKS: FP8_GROUP, "rows": None}
"""Columns that share a scale, by the quantization of a GEMM's input to a byte an element; ``None``: a whole row."""
NVFP4_INPUT_BYTES = 1 / 2 + 1 / 16
"""Bytes of an activation's element in NVFP4, with a byte of scale for every 16."""
FP8_INPUT_BYTES = {BLOCKS: 1 + 4 / FP8_GROUP, "rows": 1.0}
"""The same in FP8, by quantization."""
#: Bytes of a weight on Marlin: four bits, and a scale of 16 bits for 32 rows. Other groups take up to a tenth less.
PACKED_BYTES = 0.5 + 2 / 32
#: The Triton attention backend's splits of a decode of latent attention: a power of 2, as many as a Hopper GPU has SMs.
DECODE_SPLITS = 256
PARTS = {
    "hidden": "hidden-size tensors",
    "attention": "q/kv latents of the attention inputs",
    "routing": "router logits, top-k ids and weights",
    "inputs": "quantized activations and their scales",
    "released": "given back: attention's buffer of the decode before",
    "workspace": "while the runner works",
}
#: The name of the place that ``PARTS`` are of.
MOE = "the routed experts"
RUNNERS = ("triton", "marlin", *runners.TRTLLM[:2])
"""Runners with a formula, by ``--moe-runner-backend``."""
ROUTES_IN_FLOAT = ("glm4-moe", "minimax-m2")
"""Families whose routers compute in float32 (``models/glm4_moe.py``, ``models/minimax_m2.py``)."""


@dataclass(frozen=True)
class Acting:
    """Differences from a stock server of 0.5.12.post1 or older, for which all are false.

    :param inputs_dropped: attention's inputs are gone when attention is (output-buffer; the engine from 0.5.13 on).
    :param shared_last: shared experts run after the routed ones (deferred-shared-experts).
    :param dead_input: the layer's dead input is the runner's output, or its memory for the activation.
    :param columns: columns of a slice in which Triton or Marlin sums (moe-workspace); ``None``: the tensor is whole.
    :param out_of_place: the engine itself has Triton leave its input alone, as shared experts read it at the same time.
    """

    inputs_dropped: bool = False
    shared_last: bool = False
    dead_input: bool = False
    columns: int | None = None
    out_of_place: bool = False


@dataclass(frozen=True)
class Prediction:
    """Bytes beyond the state before a forward.

    :param parts: bytes of each of ``PARTS``, in a MoE layer that has one with a residual before it.
    :param elsewhere: bytes at the other places that can be the peak.
    """

    parts: dict[str, int]
    elsewhere: dict[str, int]

    @property
    def live(self) -> int:
        """Bytes when the runner starts."""
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


@dataclass(frozen=True)
class Runner:
    """The routed experts' runner.

    :param name: one of ``RUNNERS``.
    :param quantization: quantization of the inputs of Triton's experts: ``None`` (bfloat16), or one of ``SCALED``.
    :param workspace: bytes that one of TRT-LLM's kernels takes while it runs.
    :param input_bytes: bytes of an element of such a kernel's input.
    :param copies_output: the engine copies the kernel's output into a tensor of its own.
    """

    name: str
    quantization: str | None = None
    workspace: int = 0
    input_bytes: float = NVFP4_INPUT_BYTES
    copies_output: bool = False


def predict(
    model: Model,
    layout: Layout,
    runner: Runner,
    tokens: int,
    acting: Acting,
    *,
    graphs: bool = False,
    float_logits: bool = False,
) -> Prediction:
    """Memory of a forward pass of a first chunk, whose prompts have nothing in the KV cache.

    Stock has these tensors alive: the residual, the layer's input (dead by then), the MoE input, the output of shared
    experts that run by themselves, q/kv latents, and an output that the NVFP4 kernel gets. With the changes, on
    DeepSeek's architecture, the shared experts run last and the latents are freed. The NVFP4 kernels then write into
    the dead input, and so does Triton if the shared experts run last.

    :param model: with its shared experts as the engine runs them: as routed ones where it makes them so.
    :param layout: of tensor parallelism, and expert parallelism without all-to-all; not of data-parallel attention.
    :param tokens: tokens of the chunk.
    :param graphs: decodes run in graphs. An eager decode before leaves a buffer of attention behind, freed then.
    :param float_logits: DeepSeek's router puts out float32 (releases from 0.5.15).
    :raises ValueError: a size does not divide by the ranks.
    """
    mla = model.q_lora_rank is not None
    share = replace(model, moe_intermediate=0).shard(layout.tp)  # everything but the routed experts
    rank = model.per_rank(layout)
    hidden = 2 * tokens * model.hidden
    count = 3 + (bool(model.shared_experts) and not acting.shared_last)
    in_float = model.family in ROUTES_IN_FLOAT
    logits = (4 if in_float or float_logits else 2) * tokens * model.experts
    kv_latent = model.latent.kv_rank + model.latent.rotary
    latents = 2 * tokens * (model.q_lora_rank + kv_latent) if model.q_lora_rank is not None else 0
    held_latents = 0 if acting.inputs_dropped else latents
    released = -4 * share.heads * DECODE_SPLITS * model.latent.kv_rank if mla and not graphs else 0

    inputs = 0
    out_of_place = acting.shared_last or acting.out_of_place
    if runner.name == "triton":
        count += out_of_place and not acting.dead_input  # so its output
    elif runner.name != "marlin":
        inputs = int(tokens * model.hidden * runner.input_bytes)
        count += (not acting.dead_input) + runner.copies_output  # its output, and the copy
    parts = {
        "hidden": count * hidden,
        "attention": held_latents,
        "routing": logits + 8 * tokens * model.top_k,
        "inputs": inputs,
        "released": released,
        "workspace": runner.workspace,
    }
    if runner.name in ("triton", "marlin"):
        # Triton's output lies there then, not its activation.
        offered = acting.dead_input and (runner.name == "marlin" or not out_of_place)
        parts["workspace"] = held(runner, rank, tokens, acting.columns or model.hidden, dead_input=offered)
    elsewhere = {"attention": released + latents + attention(share, tokens)}
    if in_float:
        elsewhere["the router"] = (3 + bool(model.shared_experts)) * hidden + 4 * tokens * model.hidden + logits
    if model.dense_layers:
        elsewhere["the first layer's MLP"] = released + held_latents + 3 * hidden + 6 * tokens * share.intermediate
    return Prediction(parts, elsewhere)


def held(runner: Runner, rank: Rank, tokens: int, width: int, *, dead_input: bool) -> int:
    """Most bytes that Triton or Marlin holds at once.

    Triton (``_fused_moe_kernel_sequence`` of the engine's ``fused_moe.py``): in columns the second GEMM runs for a
    range of columns at a time. It quantizes its input before that, and then frees the input.

    Marlin (``fused_marlin_moe``): both GEMMs' outputs share one tensor, and its output is never its input's memory.
    In columns each is by itself, the second one as wide as a range, whose weights are there twice.

    :param width: columns of a range; the hidden size: the tensor is whole.
    :param dead_input: it is there for Triton's activation, which may be too large for it, or for Marlin's output.
    """
    size, inner, rows = rank.hidden, rank.intermediate, tokens * rank.top_k
    activation = 2 * inner * rows
    if runner.name == "marlin":
        if width >= size:
            return activation + max(2 * activation, 2 * size * rows) + 2 * tokens * size
        output = 0 if dead_input else 2 * tokens * size
        column_bytes = int(PACKED_BYTES * rank.experts * inner)  # of weights and scales, all experts together
        return max(3 * activation, activation + output + width * (2 * rows + column_bytes))

    def quantized(rows: int, size: int) -> int:
        """A GEMM's input in one byte an element, with a float32 scale for every so many columns (:data:`SCALED`)."""
        if runner.quantization is None:
            return 0
        return rows * (size + 4 * -(-size // (SCALED[runner.quantization] or size)))

    first, given = 2 * activation + quantized(tokens, size), quantized(rows, inner)
    own = 0 if dead_input and rank.top_k * inner <= size else activation
    if width >= size:
        return max(first, 2 * activation + own, own + given + 2 * size * rows)
    return max(first, 2 * activation + own, given + (0 if runner.quantization else own) + 2 * width * rows)


def attention(share: Model, tokens: int) -> int:
    """Bytes of the hidden-size tensors and of attention's own tensors, but for the latents of MLA.

    The Triton backend copies values that do not lie together, as those of MLA, which share a tensor with the keys. The
    copy is freed before the output projection runs.

    :param share: a rank's share of the model.
    """
    hidden = 2 * tokens * share.hidden
    if share.q_lora_rank is not None:
        latent = share.latent
        with_rotary = latent.plain + latent.rotary
        # Queries, keys, keys and values without the rotary part, and the output.
        columns_of_head = 2 * with_rotary + latent.plain + latent.value + latent.value
        own = 2 * tokens * share.heads * columns_of_head
        return 2 * hidden + own + max(hidden, 2 * tokens * share.heads * latent.value)
    # Queries, keys and values in one tensor, and the output; MiniMax-M2's norms of queries and keys are out of place.
    heads = 2 * share.heads + 2 * share.kv_heads
    if share.family == "minimax-m2":
        heads += share.heads + share.kv_heads
    return 3 * hidden + 2 * tokens * heads * share.head_dim
