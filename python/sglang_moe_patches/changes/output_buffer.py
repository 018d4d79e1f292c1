"""output-buffer: the routed experts write into the layer's own dead input instead of a fresh tensor.

Why
    Each MoE layer allocates a tensor of the hidden size while two others of that size are dead, and still referenced.

Hook points
    ``_initialize_model``, after which each known decoder layer's ``forward`` offers its input; where the engine has no
    buffer, ``fused_experts_none_to_flashinfer_trtllm_fp4``, ``FusedMoE.__init__`` and
    ``DeepseekV2AttentionMLA.forward``; where it has one, its ``moe_output_buffer_ctx``.

Skipped
    up to 0.5.12.post1 without FlashInfer, but for the attention inputs; layer by layer where the input is not proven
    dead, while a module has forward hooks, and under ``torch.compile``.

Costs
    In each layer, a comparison of storages. It saves memory alone.

How
    A decoder layer offers its input where it is dead (:mod:`sglang_moe_patches.core.dead_input`: the families of
    models, and when). The NVFP4 TRT-LLM runner takes it where it would have allocated its output, if it fits; the
    CuteDSL runner does so through cutedsl-sizing. Attention inputs are dropped when ``self_attn`` returns.

    Where the engine has all this built in, it offers the input of every DeepSeek MoE layer, also of one that starts
    without a residual, whose input *becomes* the residual: every answer is wrong. Its own offer is withheld there, in
    every layer, and ours go through its channel.

Upstream
    sgl-project/sglang#25379, in releases from 0.5.13, for DeepSeek-architecture models; the hole is in each of them.

Remove when
    0.5.12.post1 is no longer supported, the engine looks at the residual before it offers, and other families offer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sglang_moe_patches.core import engine, runners
from sglang_moe_patches.core.dead_input import counts, probe, takers
from sglang_moe_patches.core.patch import (
    INPUTS_DROPPED,
    OUTPUT_IN_DEAD_INPUT,
    BuiltModel,
    Change,
    Count,
    Decision,
    Install,
    Plan,
    Status,
    combine_installs,
)


def _plan() -> Plan:
    offers = probe.probe_offers()
    if probe.has_engine_offer():
        return Plan(Status.HARDENED, offers.note, offers.install)
    installs = [_probe_attention_inputs()]
    if engine.has_module("flashinfer"):
        installs += [takers.probe_trtllm(), offers.install]
    return Plan(Status.APPLIED, offers.note, combine_installs(*installs))


def _probe_attention_inputs() -> Install:
    """Probe what keeps attention's inputs; installed, they are dropped when attention returns, whatever the runner.

    :raises engine.Unsupported: the engine is not what this expects.
    """
    import torch

    communicator = engine.module("sglang.srt.layers.communicator")
    try:
        deepseek = engine.module("sglang.srt.models.deepseek_v2")
    except engine.Unsupported:  # the engine serves none of its models either
        return lambda patcher: None
    attention = engine.require_unpatched(deepseek, "DeepseekV2AttentionMLA")
    engine.require_unpatched(attention, "forward")
    engine.require("forward" in vars(attention), "DeepseekV2AttentionMLA has no forward of its own")
    context = engine.get(communicator, "get_attn_tp_context")()
    engine.get(context, "set_attn_inputs")
    is_compiling = torch.compiler.is_compiling

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(self, *args, **kwargs)
            if not is_compiling():
                context.set_attn_inputs(None)
            return output

        return forward

    return lambda patcher: patcher.wrap(attention, "forward", wrap)


def decide(built: BuiltModel) -> Decision:
    """Which layers offer their input to a runner that takes it as its output, and whether attention's are dropped."""
    offering, reasons = probe.find_offers(built.model)
    taking = [experts for experts in offering if runners.runner_of(experts) in runners.TRTLLM]
    effects = [OUTPUT_IN_DEAD_INPUT] if taking else []
    if not probe.has_engine_offer() and _has_attention_inputs(built.model):
        effects.append(INPUTS_DROPPED)
    used = ", ".join(sorted({str(runners.runner_of(experts)) for experts in runners.layers_of(built.model)}))
    takes_none = f"what {used} runs here takes no output buffer"
    reason = takes_none if offering or not reasons else f"{takes_none}, and {reasons[0]}"
    return Decision(tuple(effects), "" if taking else reason)


def _has_attention_inputs(model: Any) -> bool:
    """Whether a model has the attention whose inputs are dropped when it returns."""
    try:
        attention = engine.module("sglang.srt.models.deepseek_v2").DeepseekV2AttentionMLA
    except engine.Unsupported:
        return False
    return any(isinstance(module, attention) for module in model.modules())


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
    decide=decide,
)
