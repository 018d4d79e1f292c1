"""List of all changes of this package, in the order in which the start-up line and ``doctor`` report them.

The launcher imports this module, too. The import therefore loads neither torch nor the engine.
"""

from sglang_moe_patches.changes import (
    cutedsl_sizing,
    deferred_shared_experts,
    fp4_weights,
    moe_workspace,
    mori_input_truncation,
    output_buffer,
)
from sglang_moe_patches.memory import activation_segments, kv_sizing

CHANGES = (
    output_buffer.CHANGE,
    deferred_shared_experts.CHANGE,
    fp4_weights.CHANGE,
    mori_input_truncation.CHANGE,
    cutedsl_sizing.CHANGE,
    moe_workspace.CHANGE,
    activation_segments.CHANGE,
    kv_sizing.CHANGE,
)
