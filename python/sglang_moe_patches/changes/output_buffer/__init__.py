"""output-buffer: the routed experts write into the layer's own dead input instead of a fresh tensor.

Why
    Every MoE layer allocates a hidden-size output while the layer's input, dead since attention read it, is still
    referenced by the model's loop. At a 16K-token prefill of Kimi-K2.5 each of those tensors is 235 MB, and the
    attention inputs (another one, and the q/kv latents) stay referenced until the next layer replaces them.

Hook points
    ``_initialize_model``, after which each known decoder layer's ``forward`` offers its input; where the engine has no
    buffer, ``fused_experts_none_to_flashinfer_trtllm_fp4``, ``FusedMoE.__init__`` and
    ``DeepseekV2AttentionMLA.forward`` (:mod:`.attention_inputs`); where it has one, its ``moe_output_buffer_ctx``.

Skipped
    never for a server; layer by layer where the input is not proven dead, while a module has forward hooks, and under
    ``torch.compile``.

Costs
    In each layer, a comparison of storages. It saves memory alone.

How
    A decoder layer offers its input where it is dead (:mod:`sglang_moe_patches.core.dead_input`: the families of
    models, and when). The NVFP4 TRT-LLM runner takes it where it would have allocated its output, if it fits; the
    CuteDSL runner does so through cutedsl-sizing.

    Where the engine has no buffer, its TRT-LLM runner is made to take the offered one
    (:mod:`sglang_moe_patches.core.dead_input.takers`), and marked as not mutating its input, which it never did;
    attention inputs are dropped when ``self_attn`` returns, whatever the runner.

    Where the engine has all this built in, it offers the input of every DeepSeek MoE layer, also of one that starts
    without a residual, whose input *becomes* the residual: every answer is wrong. Its own offer is withheld there, in
    every layer, and ours go through its channel.

Upstream
    sgl-project/sglang#25379, in releases from 0.5.13, for DeepSeek-architecture models; the hole is in each of them.

Remove when
    0.5.12.post1 is no longer supported, the engine looks at the residual before it offers, and other families offer.
"""

from __future__ import annotations

from sglang_moe_patches.changes.output_buffer import attention_inputs
from sglang_moe_patches.core import engine
from sglang_moe_patches.core.dead_input import counts, probe, takers
from sglang_moe_patches.core.patch import Change, Count, Patcher, Plan, Status


def _plan() -> Plan:
    offers = probe.offers()
    if probe.engine_offers():
        return Plan(Status.HARDENED, offers.note, offers.install)
    installs = [attention_inputs.probe()]
    if engine.has_module("flashinfer"):
        installs += [takers.trtllm(), offers.install]

    def install(patcher: Patcher) -> None:
        for part in installs:
            part(patcher)

    return Plan(Status.APPLIED, offers.note, install)


ATTENTION_INPUTS = Count(
    "attention inputs",
    "dropped attention's inputs",
    "sglang.srt.layers.communicator",
    "AttnTpContext.set_attn_inputs",
    lambda result, context, inputs: inputs is None,  # the engine never does
    before_layer=True,
)
CHANGE = Change(
    name="output-buffer",
    summary="the routed experts of TRT-LLM and CuteDSL write into the decoder layer's dead input, in every family of "
    "models whose code shows that it is dead; DeepSeek's attention inputs are dropped; other models are left alone",
    plan=_plan,
    counts=(counts.OFFERED, counts.AS_OUTPUT, ATTENTION_INPUTS),
)
