"""Memory of a forward pass, predicted from the layers' sizes: pure functions, all results in bytes.

R is the number of rows (tokens x top-k), H is the hidden size, and I is the intermediate size per rank. All activations
are bfloat16. The lifetimes of tensors follow the code of SGLang 0.5.12.post1 with its Triton attention backend.

A *place* is a step of the forward pass at which its memory can be largest. The peak is the largest sum of tensors over
all places. The places and their tensors, in bytes:

- The Triton runner can have its peak at two places. At the activation, the outputs of the first GEMM (4IR) and of the
  activation (2IR) are alive. At the second GEMM, the output of the activation (2IR) and the [tokens, top-k, hidden]
  tensor (2HR) are alive. FP8 in blocks adds each GEMM's quantized input, with a float32 scale for every 128 columns.
- Marlin needs 2IR + max(4IR, 2HR) + its output. With the change moe-workspace, which computes slices of W columns,
  Marlin needs max(6IR, 2IR + its output + W x (2R + bytes of one column's weights)).
- The router of GLM-4-MoE and MiniMax-M2 converts its input to float32, which takes 4H for each token.
- Attention has its peak while the output projection runs. These tensors are then alive: attention's input, the
  residual, the projection's output, the output of attention, and all tensors of queries, keys and values that a Python
  name still refers to.
- The MLP of the first layer counts if this layer is dense. Gate and up projections and the activation are alive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_moe_patches.core import runners
from sglang_moe_patches.lab.predict.shapes import Layout, Model, Rank

#: Columns of an FP8 tensor that share a scale.
FP8_GROUP = 128
BLOCKS = "fp8"
"""Name of FP8 quantization with one scale for each block of 128 x 128 weights."""
SCALE_COLUMNS = {BLOCKS: FP8_GROUP, "rows": None}
"""Number of columns of a GEMM's input that share a scale. The key is the kind of 8-bit quantization. ``None`` means
that all columns of a row share a scale."""
NVFP4_INPUT_BYTES = 1 / 2 + 1 / 16
"""Bytes for one element of a GEMM's input in NVFP4: half a byte, and a scale of one byte for every 16 elements."""
FP8_INPUT_BYTES = {BLOCKS: 1 + 4 / FP8_GROUP, "rows": 1.0}
"""Bytes for one element of a GEMM's input in FP8. The key is the kind of quantization. In blocks, one float32 scale for
every 128 elements is counted. With one scale for each row, the scales are too small to count."""
#: Bytes of a 4-bit weight on Marlin: four bits, and a scale of 16 bits for 32 rows. Larger groups take up to a tenth
#: less.
PACKED_BYTES = 0.5 + 2 / 32
#: Number of parts into which the Triton attention backend divides the attention of a decode with MLA. On Hopper GPUs,
#: it is the number of SMs, rounded up to a power of 2.
DECODE_SPLITS = 256
PARTS = {
    "hidden": "hidden-size tensors",
    "attention": "q/kv latents of the attention inputs",
    "routing": "router logits, top-k ids and weights",
    "inputs": "quantized activations and their scales",
    "released": "attention's buffer of the previous decode, freed",
    "workspace": "temporary tensors of the MoE runner",
}
#: Name of the place (a step of the forward pass) at which a MoE runner works. ``PARTS`` are the parts of its memory.
MOE = "the routed experts"
RUNNERS = ("triton", "marlin", *runners.TRTLLM[:2])
"""MoE runners whose memory this module can predict, by their names for ``--moe-runner-backend``."""
FLOAT_ROUTER_FAMILIES = ("glm4-moe", "minimax-m2")
"""Model families whose routers compute in float32 (``models/glm4_moe.py``, ``models/minimax_m2.py``)."""


@dataclass(frozen=True)
class MemoryEffects:
    """Effects on the memory of a forward pass. They come from the changes, or from the engine itself. The defaults are
    those of a stock server up to 0.5.12.post1.

    :param inputs_dropped: whether attention's inputs are freed when attention ends (change output-buffer, or the engine
        itself from 0.5.13 on).
    :param shared_last: whether shared experts run after the routed experts (change deferred-shared-experts).
    :param dead_input: whether the runner writes its output, or its activation, into the layer's *dead input*: the
        memory of the layer's input after its last use.
    :param columns: columns of a slice, if Triton or Marlin computes its output in slices of columns (change
        moe-workspace); ``None`` without slices.
    :param out_of_place: whether the engine itself keeps Triton from writing over its input, because shared experts read
        the input at the same time.
    """

    inputs_dropped: bool = False
    shared_last: bool = False
    dead_input: bool = False
    columns: int | None = None
    out_of_place: bool = False


@dataclass(frozen=True)
class Prediction:
    """Predicted bytes of a forward pass, in addition to the memory that was in use before it.

    :param parts: memory while a MoE runner works, in a layer that is not the first layer. The keys are those of
        ``PARTS``, and the values are bytes.
    :param elsewhere: bytes at other steps of the forward pass, such as "attention", at which its memory can be largest.
    """

    parts: dict[str, int]
    elsewhere: dict[str, int]

    @property
    def bytes_before_runner(self) -> int:
        """Bytes that are in use when the MoE runner starts."""
        return sum(self.parts.values()) - self.parts["workspace"]

    @property
    def places(self) -> dict[str, int]:
        """Bytes at each step of the forward pass that can be its peak. The key is the step's name."""
        return {MOE: sum(self.parts.values()), **self.elsewhere}

    @property
    def peak(self) -> int:
        return max(self.places.values())

    @property
    def peak_place(self) -> str:
        """Part of the model in which the forward pass needs the most memory, such as "attention" or :data:`MOE`."""
        return max(self.places, key=self.places.__getitem__)


@dataclass(frozen=True)
class Runner:
    """MoE runner: the engine's implementation of the routed experts.

    :param name: one of ``RUNNERS``.
    :param quantization: quantization of the inputs of Triton's GEMMs: ``None`` (bfloat16), or a key of
        ``SCALE_COLUMNS``.
    :param workspace: bytes that a TRT-LLM kernel takes while it runs.
    :param input_bytes: bytes for one element of the quantized copy of a TRT-LLM kernel's input; 0 if the kernel reads
        the 16-bit input itself.
    :param copies_output: whether the engine copies the TRT-LLM kernel's output into another tensor.
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
    acting: MemoryEffects,
    *,
    graphs: bool = False,
    float_logits: bool = False,
) -> Prediction:
    """Predict the memory of a forward pass of a prefill chunk whose prompts have nothing in the KV cache.

    In a stock server, these tensors are alive while the MoE runner works: the residual, the layer's input (which no
    code reads any more), the MoE input, the output of separate shared experts, the latents of queries, keys and values,
    and an output tensor that the NVFP4 kernel receives. With the changes, on DeepSeek's architecture, the shared
    experts run last and the latents are freed. The NVFP4 kernels and Triton then write their output into the layer's
    input.

    :param model: sizes of the model. Shared experts that the engine runs as routed ones are counted as routed.
    :param layout: layout with tensor parallelism, or with expert parallelism without all-to-all. Data-parallel
        attention is not supported.
    :param runner: MoE runner of the server.
    :param tokens: tokens of the chunk.
    :param acting: effects of the changes and of the engine.
    :param graphs: whether decodes run in graphs. If decodes run eagerly, this forward pass frees a buffer of the
        previous decode.
    :param float_logits: whether DeepSeek's router computes float32 logits (releases from 0.5.15 on).
    :raises ValueError: a size is not divisible by the number of ranks.
    """
    mla = model.q_lora_rank is not None
    share = replace(model, moe_intermediate=0).shard(layout.tp)  # sizes of everything except the routed experts
    rank = model.per_rank(layout)
    hidden = 2 * tokens * model.hidden
    count = 3 + (bool(model.shared_experts) and not acting.shared_last)
    in_float = model.family in FLOAT_ROUTER_FAMILIES
    logits = (4 if in_float or float_logits else 2) * tokens * model.experts
    kv_latent = model.latent.kv_rank + model.latent.rotary
    latents = 2 * tokens * (model.q_lora_rank + kv_latent) if model.q_lora_rank is not None else 0
    held_latents = 0 if acting.inputs_dropped else latents
    released = -4 * share.heads * DECODE_SPLITS * model.latent.kv_rank if mla and not graphs else 0

    inputs = 0
    out_of_place = acting.shared_last or acting.out_of_place
    if runner.name == "triton":
        count += out_of_place and not acting.dead_input  # output of the runner
    elif runner.name != "marlin":
        inputs = int(tokens * model.hidden * runner.input_bytes)
        count += (not acting.dead_input) + runner.copies_output  # output of the runner, and the copy of the output
    parts = {
        "hidden": count * hidden,
        "attention": held_latents,
        "routing": logits + 8 * tokens * model.top_k,
        "inputs": inputs,
        "released": released,
        "workspace": runner.workspace,
    }
    if runner.name in ("triton", "marlin"):
        # If Triton does not write over its input, the dead input receives Triton's output and not its activation.
        offered = acting.dead_input and (runner.name == "marlin" or not out_of_place)
        parts["workspace"] = runner_bytes(runner, rank, tokens, acting.columns or model.hidden, dead_input=offered)
    elsewhere = {"attention": released + latents + attention_bytes(share, tokens)}
    if in_float:
        elsewhere["the router"] = (3 + bool(model.shared_experts)) * hidden + 4 * tokens * model.hidden + logits
    if model.dense_layers:
        elsewhere["the first layer's MLP"] = released + held_latents + 3 * hidden + 6 * tokens * share.intermediate
    return Prediction(parts, elsewhere)


def runner_bytes(runner: Runner, rank: Rank, tokens: int, width: int, *, dead_input: bool) -> int:
    """Return the peak bytes of the Triton or Marlin runner while it works, not counting Triton's output.

    Triton's code is ``_fused_moe_kernel_sequence`` in the engine's ``fused_moe.py``. With the change moe-workspace, the
    second GEMM computes a slice of columns at a time. The runner quantizes the second GEMM's input before the slices,
    and then frees the unquantized input.

    Marlin's code is ``fused_marlin_moe``. In the stock engine, the outputs of both GEMMs share one tensor. The stock
    Marlin runner never writes its output into its input. With moe-workspace, each GEMM has a tensor of its own. The
    tensor of the second GEMM is as wide as a slice, and the weights of the slice exist twice.

    :param width: columns of a slice. If ``width`` is the hidden size, the output is computed without slices.
    :param dead_input: whether the runner can write into the *dead input*: the memory of the layer's input after its
        last use. Marlin writes its output into the dead input. Triton writes its activation there, if it fits.
    """
    size, inner, rows = rank.hidden, rank.intermediate, tokens * rank.top_k
    activation = 2 * inner * rows
    if runner.name == "marlin":
        if width >= size:
            return activation + max(2 * activation, 2 * size * rows) + 2 * tokens * size
        output = 0 if dead_input else 2 * tokens * size
        column_bytes = int(PACKED_BYTES * rank.experts * inner)  # weights and scales of one column, in all experts
        return max(3 * activation, activation + output + width * (2 * rows + column_bytes))

    def quantized_bytes(rows: int, size: int) -> int:
        """Return the bytes of a GEMM's quantized input: one byte for each element, and the float32 scales
        (:data:`SCALE_COLUMNS`). Return 0 if the runner does not quantize its inputs."""
        if runner.quantization is None:
            return 0
        return rows * (size + 4 * -(-size // (SCALE_COLUMNS[runner.quantization] or size)))

    first, given = 2 * activation + quantized_bytes(tokens, size), quantized_bytes(rows, inner)
    own = 0 if dead_input and rank.top_k * inner <= size else activation
    if width >= size:
        return max(first, 2 * activation + own, own + given + 2 * size * rows)
    return max(first, 2 * activation + own, given + (0 if runner.quantization else own) + 2 * width * rows)


def attention_bytes(share: Model, tokens: int) -> int:
    """Return the bytes of attention's tensors and of the [tokens, hidden] tensors, without the latents of MLA.

    The Triton backend copies values that are not contiguous. In MLA, the values share a tensor with the keys, so they
    are not contiguous. The copy is freed before the output projection runs.

    :param share: sizes of one rank's share of the model.
    """
    hidden = 2 * tokens * share.hidden
    if share.q_lora_rank is not None:
        latent = share.latent
        with_rotary = latent.plain + latent.rotary
        # The tensors are: the queries; the keys; the keys and values without the rotary part; the output.
        columns_of_head = 2 * with_rotary + latent.plain + latent.value + latent.value
        own = 2 * tokens * share.heads * columns_of_head
        return 2 * hidden + own + max(hidden, 2 * tokens * share.heads * latent.value)
    # Queries, keys and values share one tensor. The output is another tensor. MiniMax-M2 writes the norms of queries
    # and keys into new tensors.
    heads = 2 * share.heads + 2 * share.kv_heads
    if share.family == "minimax-m2":
        heads += share.heads + share.kv_heads
    return 3 * hidden + 2 * tokens * heads * share.head_dim
