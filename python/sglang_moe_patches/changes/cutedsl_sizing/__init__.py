"""cutedsl-sizing: CuteDSL buffers that fit every forward pass, allocated once instead of once per layer.

Why
    Each layer has a FlashInfer wrapper of its own. The engine guesses for how many tokens the wrapper's buffers need
    room. If a forward pass has more tokens than fit into the buffers, the server ends.

Hook points
    ``ensure_cutedsl_wrapper`` of the engine's CuteDSL runner, ``ModelOptNvFp4FusedMoEMethod.apply``,
    ``ModelRunner.init_memory_pool`` (:mod:`.wrapper`), and ``ServerArgs`` in every process (:mod:`.launcher`).

Skipped
    Servers with another ``--moe-runner-backend``, and releases of FlashInfer whose wrapper keeps no buffers.

How
    The buffers have room for the largest forward pass that the engine's scheduler can produce
    (:func:`.tokens.compute_max_forward_tokens`). Layers with the same configuration share one wrapper. This is safe
    because a wrapper has no weights and layers run one after another. The output is written into the buffer that
    output-buffer offers, or into a new tensor, because the next layer would overwrite the wrapper's own buffer. If a
    forward pass is larger than the buffers nevertheless, it runs in slices of tokens.

Costs
    One more Python call in each layer. A forward pass that runs in slices reads the weights once for each slice.

Upstream
    From 0.5.13 on the engine computes the size of the buffers (sgl-project/sglang#26696). A forward pass can be larger
    than this size, and every layer allocates buffers of its own. From 0.5.16 on the engine uses FlashInfer 0.6.14,
    whose wrapper keeps no buffers and accepts forward passes of any size.

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
    """Return what cutedsl-sizing does in a built model: whether a layer runs on CuteDSL, and whether such a layer
    writes its output into its dead input.
    """
    if not any(runners.find_runner(experts) == runners.CUTEDSL for experts in runners.find_layers(built.model)):
        return Decision(reason="no layer runs on CuteDSL")
    offering, _ = probe.find_offers(built.model)
    takes = any(runners.find_runner(experts) == runners.CUTEDSL for experts in offering)
    return Decision((SHARED_BUFFERS, *((OUTPUT_IN_DEAD_INPUT,) if takes else ())))


CHANGE = Change(
    name="cutedsl-sizing",
    summary="CuteDSL's buffers fit the largest forward pass, and all layers share them",
    plan=wrapper.plan,
    skip=runners.skip_unless_runner(runners.CUTEDSL),
    variables=(BUDGET,),
    counts=(
        Count(
            "shares",
            "used buffers that are shared by layers",
            wrapper.__name__,
            "_construct_wrapper",
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
