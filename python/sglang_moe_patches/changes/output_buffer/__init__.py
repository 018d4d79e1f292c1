"""output-buffer: the routed experts write into the layer's own dead input instead of a fresh tensor.

Why
    Every MoE layer allocates a hidden-size output while the layer's input, dead since attention read it, is still
    referenced by the model's loop. At a 16K-token prefill of Kimi-K2.5 each of those tensors is 235 MB, and the
    attention inputs (another one, and the q/kv latents) stay referenced until the next layer replaces them.

How
    ``lend``, where the engine has no buffer: the decoder layer offers its input (:mod:`sglang_moe_patches.handoff`);
    the NVFP4 TRT-LLM runner takes it where it would have allocated its output, if it fits. The attention inputs are
    dropped when ``self_attn`` returns. The TRT-LLM runners are marked as not mutating their input, which they never
    did.

    ``withhold``, where the engine has all this built in: it offers the input of every MoE layer, also of one that
    starts without a residual, whose input *becomes* the residual: every answer is wrong. There, and only there, the
    offer is withdrawn. Everything else stays the engine's.

Upstream
    sgl-project/sglang#25379, in releases from 0.5.13; the hole is in each of them.

Remove when
    0.5.12.post1 is no longer supported, and the engine looks at the residual before it offers.
"""

from __future__ import annotations

from sglang_moe_patches import engine, runners
from sglang_moe_patches.patch import Change, Plan

ENGINE_OFFER = "moe_output_buffer_ctx"
"""The engine's own hand-off, in ``moe_runner.base`` where there is one."""


def _plan() -> Plan:
    from sglang_moe_patches.changes.output_buffer import lend, withhold

    if absent := runners.without_flashinfer():
        return absent
    base = engine.module("sglang.srt.layers.moe.moe_runner.base")
    return withhold.plan(base) if hasattr(base, ENGINE_OFFER) else lend.plan()


CHANGE = Change(
    name="output-buffer",
    summary="the routed experts write into the decoder layer's dead input",
    plan=_plan,
    unneeded=runners.unneeded_without(*runners.TRTLLM, runners.CUTEDSL),
)
