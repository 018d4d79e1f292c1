"""cutedsl-sizing: CuteDSL buffers that fit every forward, and are allocated once instead of once per layer.

Why
    Each layer has a wrapper of its own, whose buffers are sized by a guess. A larger forward ends the server.

Hook points
    ``ensure_cutedsl_wrapper`` of the engine's CuteDSL runner, ``ModelOptNvFp4FusedMoEMethod.apply``,
    ``ModelRunner.init_memory_pool`` (:mod:`.wrapper`); ``ServerArgs``, in every process (:mod:`.launcher`).

Skipped
    with another ``--moe-runner-backend``, and where FlashInfer's wrapper keeps no buffers.

How
    The number of tokens is the largest that the engine's scheduler can bring (:func:`.tokens.max_forward_tokens`).
    Layers of the same configuration share one wrapper: it holds no weights, and layers run one after another. Its
    output does not go into its own buffer, which the next layer would overwrite, but into the buffer that output-buffer
    offers, or a fresh tensor. A forward that is larger all the same runs in slices.

Costs
    In each layer one more Python call. A forward in slices reads the weights once for each.

Upstream
    The sizing: sgl-project/sglang#26696, in releases from 0.5.13, which is not the worst case and paid in every layer.
    FlashInfer 0.6.14, which releases from 0.5.16 bring, keeps no buffers and refuses no forward.

Remove when
    0.5.15.post1 is no longer supported.
"""

from __future__ import annotations

from sglang_moe_patches.changes.cutedsl_sizing import wrapper
from sglang_moe_patches.changes.cutedsl_sizing.launcher import BUDGET, extend_server_args
from sglang_moe_patches.core import runners
from sglang_moe_patches.core.dead_input import probe
from sglang_moe_patches.core.patch import OUTPUT_IN_DEAD_INPUT, SHARED_BUFFERS, BuiltModel, Change, Count, Decision


def decide(built: BuiltModel) -> Decision:
    """Which layers CuteDSL runs, and whether they offer it their input as its output."""
    if not any(runners.runner_of(experts) == runners.CUTEDSL for experts in runners.layers_of(built.model)):
        return Decision(reason="no layer runs on CuteDSL")
    offering, _ = probe.find_offers(built.model)
    takes = any(runners.runner_of(experts) == runners.CUTEDSL for experts in offering)
    return Decision((SHARED_BUFFERS, *((OUTPUT_IN_DEAD_INPUT,) if takes else ())))


CHANGE = Change(
    name="cutedsl-sizing",
    summary="CuteDSL buffers that fit every forward, allocated once for all layers",
    plan=wrapper.plan,
    skip=runners.skip_unless_runner(runners.CUTEDSL),
    variables=(BUDGET,),
    counts=(
        Count(
            "shares",
            "gave a layer buffers that others have",
            wrapper.__name__,
            "_construct",
            lambda made, *args, **kwargs: isinstance(made, wrapper.SharedMoE),
        ),
        Count(
            "slices",
            "ran in token slices",
            wrapper.__name__,
            "split_tokens",
            lambda slices, *args: len(slices),
            unit="slices",
        ),
    ),
    decide=decide,
    launcher_hooks=(("sglang.srt.server_args", extend_server_args),),
)
