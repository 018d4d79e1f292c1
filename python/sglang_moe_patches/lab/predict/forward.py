"""What a forward's memory should be, from the layers' sizes: pure functions, all results in bytes.

R = tokens x top-k rows, H hidden size, I intermediate size per rank; all activations bfloat16. What is alive when is
what the engine's own code says (0.5.12.post1), with the Triton attention backend that the benchmarks' servers have. The
peak is the most of what the places of a forward hold, each written down by itself. In bytes:

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

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sglang_moe_patches.changes.moe_workspace import column_slices, triton
from sglang_moe_patches.core import runners
from sglang_moe_patches.lab.predict.shapes import Layout, Model, Rank

#: Columns of an FP8 tensor that share a scale.
FP8_GROUP = 128
BLOCKS = "fp8"
"""Weights in blocks of 128 x 128."""
SCALED = {BLOCKS: FP8_GROUP, "rows": None}
"""How a GEMM's input is quantized to a byte an element, and how many columns share a scale; ``None``: a whole row."""
NVFP4_INPUT_BYTES = 1 / 2 + 1 / 16
"""Of an element of an activation in NVFP4, with a byte of scale for every 16."""
FP8_INPUT_BYTES = {BLOCKS: 1 + 4 / FP8_GROUP, "rows": 1.0}
"""The same in FP8, by quantization."""
TILES = {
    None: {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "GROUP_SIZE_M": 8},
    BLOCKS: {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "GROUP_SIZE_M": 32},
    "rows": {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "GROUP_SIZE_M": 32},
}
"""Of Triton's GEMMs for many tokens where nobody tuned any (``get_default_config``), by quantization."""
#: At least what FP8 tiles of 128 rows lose in slices that go through the columns before the rows (3 to 7 %).
SLOW_ORDER_SLOWDOWN = 0.07
#: Of a weight on Marlin: four bits, and a scale of 16 bits for 32 rows. With other groups it is up to a tenth less.
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
"""Those with a formula, by ``--moe-runner-backend``."""
ROUTES_IN_FLOAT = ("glm4-moe", "minimax-m2")
"""Families whose routers compute in float32 (``models/glm4_moe.py``, ``models/minimax_m2.py``)."""


@dataclass(frozen=True)
class Acting:
    """What is otherwise than in a stock server up to 0.5.12.post1, of which none of it is true.

    :param inputs_dropped: attention's inputs are gone when attention is (output-buffer; the engine from 0.5.13 on).
    :param shared_last: shared experts run after the routed ones (deferred-shared-experts).
    :param dead_input: the layer's dead input is the runner's output, or its memory for the activation.
    :param columns: Triton or Marlin sums in columns where the tensor is large (moe-workspace).
    :param out_of_place: the engine itself has Triton leave its input alone, as shared experts read it at the same time.
    """

    inputs_dropped: bool = False
    shared_last: bool = False
    dead_input: bool = False
    columns: bool = False
    out_of_place: bool = False


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


@dataclass(frozen=True)
class Runner:
    """The routed experts' runner.

    :param name: one of ``RUNNERS``.
    :param quantization: of what Triton's experts are given: ``None`` (bfloat16), or one of ``SCALED``.
    :param tiles: of Triton's second GEMM; ``None``: those of :data:`TILES`.
    :param width: columns of a slice where it runs in columns; ``None``: as moe-workspace decides.
    :param workspace: bytes that one of TRT-LLM's kernels takes while it runs.
    :param input_bytes: of an element of what such a kernel is given.
    """

    name: str
    quantization: str | None = None
    tiles: Mapping[str, int] | None = None
    width: int | None = None
    workspace: int = 0
    input_bytes: float = NVFP4_INPUT_BYTES


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
    """A forward of a first chunk: nothing of its prompts is in the KV cache.

    Stock, the residual, the layer's input (dead by then) and the MoE input are alive, the output of shared experts that
    run by themselves, q/kv latents, and an output that the NVFP4 kernel gets. With the changes, on DeepSeek's
    architecture, the shared experts run last and the latents are gone; the NVFP4 kernels, and Triton where the shared
    experts run last, write into the dead input.

    :param model: with its shared experts as the engine runs them: as routed ones where it makes them so.
    :param layout: of tensor parallelism, and expert parallelism without all-to-all; not of data-parallel attention.
    :param tokens: of the chunk.
    :param graphs: decodes run in graphs: an eager one before leaves a buffer of attention's behind, which is then given
        back.
    :param float_logits: DeepSeek's router puts out float32 (releases from 0.5.15).
    :raises ValueError: a size does not divide by the ranks.
    """
    mla = model.q_lora_rank is not None
    share = replace(model, moe_intermediate=0).shard(layout.tp)  # of everything but the routed experts
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
        count += not acting.dead_input  # its output
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
        columns = Columns(runner, rank, tokens, 1 / layout.ep, offered)
        width = runner.width if acting.columns else model.hidden
        parts["workspace"] = columns.held(columns.width() if width is None else width)
    elsewhere = {"attention": released + latents + attention(share, tokens)}
    if in_float:
        elsewhere["the router"] = (3 + bool(model.shared_experts)) * hidden + 4 * tokens * model.hidden + logits
    if model.dense_layers:
        elsewhere["the first layer's MLP"] = released + held_latents + 3 * hidden + 6 * tokens * share.intermediate
    return Prediction(count, parts, elsewhere)


@dataclass(frozen=True)
class Columns:
    """How Triton or Marlin cuts the tensor of a chunk on one rank.

    :param tokens: in a MoE layer: data-parallel ranks bring a chunk each.
    :param local_share: of the rows, those whose expert is on this rank.
    :param dead_input: it is there for Triton's activation, which may be too large for it, or for Marlin's output.
    """

    runner: Runner
    rank: Rank
    tokens: int
    local_share: float
    dead_input: bool

    def width(self, *, at_any_cost: bool = False, max_bytes: int | None = None) -> int:
        """Columns of a slice as moe-workspace decides; the hidden size where the tensor is not cut.

        :param at_any_cost: whatever slices cost.
        :param max_bytes: that the runner may hold; ``None``: as the variable says.
        """
        rank = self.rank
        limit = column_slices.read_max_bytes() if max_bytes is None else max_bytes
        if self.runner.name == "marlin":
            if rank.hidden % column_slices.MARLIN_TILE_COLUMNS:
                return rank.hidden
            marlin = self._marlin_gemm._replace(max_slowdown_fraction=math.inf if at_any_cost else None)
            return column_slices.packed_slice_width(self._layer, marlin, limit)
        if not triton.can_run_in_columns(self.tokens, rank.top_k, hooks=None, defer_sum=False):
            return rank.hidden
        gemm = self._triton_gemm._replace(tiles=None) if at_any_cost else self._triton_gemm
        return column_slices.slice_width(self._layer, gemm, limit)

    def held(self, width: int) -> int:
        """Bytes that the runner holds, at the most.

        Triton (``_fused_moe_kernel_sequence`` of the engine's ``fused_moe.py``): in columns the second GEMM runs for a
        range of columns at a time, and quantizes its input before that, which it then gives up.

        Marlin (``fused_marlin_moe``): both GEMMs' outputs share one tensor, and its output is never its input's memory.
        In columns each is by itself, the second one as wide as a range, whose weights are there twice.

        :param width: columns of a range; the hidden size: the tensor is whole.
        """
        size, inner, tokens = self.rank.hidden, self.rank.intermediate, self.tokens
        rows = tokens * self.rank.top_k
        activation = 2 * inner * rows
        if self.runner.name == "marlin":
            if width >= size:
                return activation + max(2 * activation, 2 * size * rows) + 2 * tokens * size
            output = 0 if self.dead_input else 2 * tokens * size
            return max(3 * activation, activation + output + width * (2 * rows + _column_bytes(self.rank)))
        first, given = 2 * activation + self._quantized(tokens, size), self._quantized(rows, inner)
        own = 0 if self._has_scratch else activation
        if width >= size:
            return max(first, 2 * activation + own, own + given + 2 * size * rows)
        return max(first, 2 * activation + own, given + (0 if self.runner.quantization else own) + 2 * width * rows)

    def slowdown(self, slices: int) -> float:
        """What so many slices cost of the layer's time, by what moe-workspace was fitted to."""
        layer = self._layer
        if self.runner.name == "marlin":
            layer_us = layer.layer_us(column_slices.MARLIN_OPERATIONS_PER_US)
            return self._marlin_gemm.slicing_us(layer, slices) / layer_us
        gemm = self._triton_gemm
        slowdown = gemm.slicing_us(layer, slices) / layer.layer_us(gemm.operations_per_us)
        return max(slowdown, SLOW_ORDER_SLOWDOWN) if gemm.has_slow_order else slowdown

    def _quantized(self, rows: int, size: int) -> int:
        """A GEMM's input in one byte an element, with a float32 scale for every so many columns (:data:`SCALED`)."""
        if self.runner.quantization is None:
            return 0
        return rows * (size + 4 * -(-size // (SCALED[self.runner.quantization] or size)))

    @property
    def _has_scratch(self) -> bool:
        """Whether the activation's output lies in the dead input."""
        return self.dead_input and self.rank.top_k * self.rank.intermediate <= self.rank.hidden

    @property
    def _layer(self) -> column_slices.LayerShape:
        rank = self.rank
        itemsize = 1 if self.runner.quantization else 2
        is_packed = self.runner.name == "marlin"
        row_bytes = _column_bytes(rank) if is_packed else rank.experts * rank.intermediate * itemsize
        return column_slices.LayerShape(
            *(self.tokens, rank.top_k, rank.hidden, rank.intermediate),
            weight_bytes=3 * rank.hidden * row_bytes,
            local_row_fraction=self.local_share,
        )

    @property
    def _marlin_gemm(self) -> column_slices.MarlinGemm:
        return column_slices.MarlinGemm(_column_bytes(self.rank), self.dead_input)

    @property
    def _triton_gemm(self) -> column_slices.TritonGemm:
        quantization, groups = self.runner.quantization, self.rank.intermediate // FP8_GROUP
        in_blocks = quantization == BLOCKS
        return column_slices.TritonGemm(
            self.runner.tiles or TILES[quantization],
            quantized=bool(quantization),
            activation_in_dead_input=self._has_scratch,
            columns_per_scale=FP8_GROUP if in_blocks else 1,
            scale_stride_bytes=4 * groups if in_blocks else column_slices.OPERAND_ALIGNMENT_BYTES,
        )


def _column_bytes(rank: Rank) -> int:
    """Of a column of the second GEMM's weights and their scales, all experts together."""
    return int(PACKED_BYTES * rank.experts * rank.intermediate)


def attention(share: Model, tokens: int) -> int:
    """The hidden-size tensors, and attention's own tensors but for the latents of MLA.

    The Triton backend copies values that do not lie together, as those of MLA, which come with the keys in one tensor;
    the copy is gone when the output projection runs.

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
