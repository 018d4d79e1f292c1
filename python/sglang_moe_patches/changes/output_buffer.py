"""output-buffer: the routed experts write their output into the layer's dead input instead of a new tensor.

Why
    Each MoE layer allocates a tensor [tokens, hidden] for its output. The decoder layer's input has the same size. No
    code reads this input any more, but references keep it allocated. DeepSeek's attention has smaller inputs, the query
    and KV latents, which stay allocated in the same way.

Hook points
    * ``_initialize_model``, which builds each model. In the new model, ``forward`` of the decoder layers with a dead
      input is wrapped, so that these layers offer their input.
    * SGLang versions without an output buffer: ``fused_experts_none_to_flashinfer_trtllm_fp4`` takes the offered input,
      ``FusedMoE.__init__`` switches ``inplace`` off, and ``DeepseekV2AttentionMLA.forward`` frees attention's inputs.
    * SGLang versions with an output buffer (from 0.5.13 on): ``moe_output_buffer_ctx``, the engine's own offer. The
      wrapper makes it offer no buffer.

Skipped
    * Layers whose input is not proven dead, modules with forward hooks, and code under ``torch.compile``.
    * Servers without FlashInfer, up to 0.5.12.post1: layers offer nothing, and no runner takes an offer. Only
      attention's inputs are freed early.

Costs
    One comparison of storages in each layer.

How
    A decoder layer offers its input when the input is dead (:mod:`sglang_moe_patches.core.dead_input` explains when it
    is). The NVFP4 TRT-LLM runner writes its output into the offered memory instead of a new tensor, if the memory fits.
    The CuteDSL runner does the same through cutedsl-sizing. The inputs of DeepSeek's attention are freed when
    ``self_attn`` returns.

    SGLang versions with an output buffer have a fault: they offer the input of every DeepSeek MoE layer, even if it is
    not dead. If a layer starts without a residual, its input *becomes* the residual. The experts then overwrite the
    residual, so every answer is wrong. This change disables the engine's own offers, and offers only dead inputs. The
    runners read this change's offers in the same place as the engine's.

Upstream
    From 0.5.13 on the engine has an output buffer for DeepSeek-architecture models (sgl-project/sglang#25379), with the
    fault above.

Remove when
    0.5.12.post1 is no longer supported, the engine checks the residual before it offers, and other model families offer
    their inputs.
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
    """Return the plan for output-buffer, which says how to install the change.

    If the engine itself offers layer inputs, the plan only corrects these offers.
    """
    offers = probe.probe_offers()
    if probe.has_engine_offer():
        return Plan(Status.HARDENED, offers.note, offers.install)
    installs = [_probe_attention_inputs()]
    if engine.has_module("flashinfer"):
        installs += [takers.probe_trtllm(), offers.install]
    return Plan(Status.APPLIED, offers.note, combine_installs(*installs))


def _probe_attention_inputs() -> Install:
    """Check the engine's code, and return the installer of a wrapper that frees the inputs of DeepSeek's attention when
    attention returns.

    :raises engine.Unsupported: the engine's code is not what this change expects.
    """
    import torch

    communicator = engine.import_module("sglang.srt.layers.communicator")
    try:
        deepseek = engine.import_module("sglang.srt.models.deepseek_v2")
    except engine.Unsupported:  # the engine cannot run DeepSeek models at all
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
    """Return what output-buffer does in a built model: whether a layer writes its output into its dead input, and
    whether attention's inputs are freed early.
    """
    offering, reasons = probe.find_offers(built.model)
    taking = [experts for experts in offering if runners.find_runner(experts) in runners.TRTLLM]
    effects = [OUTPUT_IN_DEAD_INPUT] if taking else []
    if not probe.has_engine_offer() and _has_attention_inputs(built.model):
        effects.append(INPUTS_DROPPED)
    runner_names = {
        runners.find_runner(experts) or "the method's own kernel" for experts in runners.find_layers(built.model)
    }
    names = ", ".join(sorted(runner_names))
    takes_none = f"{names} uses no output buffer here"
    reason = takes_none if offering or not reasons else f"{takes_none}, and {reasons[0]}"
    return Decision(tuple(effects), "" if taking else reason)


def _has_attention_inputs(model: Any) -> bool:
    """Return whether the model has layers of DeepSeek's attention class, whose inputs this change frees early."""
    try:
        attention = engine.import_module("sglang.srt.models.deepseek_v2").DeepseekV2AttentionMLA
    except engine.Unsupported:
        return False
    return any(isinstance(module, attention) for module in model.modules())


ATTENTION_INPUTS = Count(
    "attention inputs",
    "dropped attention's inputs",
    "sglang.srt.layers.communicator",
    "AttnTpContext.set_attn_inputs",
    lambda result, context, inputs: inputs is None,  # the engine's own callers never pass None
    before_layer=True,
)
CHANGE = Change(
    name="output-buffer",
    summary="routed experts write over the layer's input after its last use; DeepSeek's attention inputs are freed "
    "early",
    plan=_plan,
    counts=(counts.OFFERED, counts.AS_OUTPUT, ATTENTION_INPUTS),
    decide=decide,
)
