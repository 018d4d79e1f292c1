"""Example data for tests of ``doctor --model``.

In an *engine query*, doctor runs the engine's code in a process without a GPU, and asks for the engine's choices. From
the answer, doctor derives a report, and the *room*: the memory that remains in addition to weights and KV cache. This
module has example answers, the report of such an answer, and example figures for the room.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from common.shapes import MODELS
from sglang_moe_patches.core.patch import COLUMNS, INPUTS_DROPPED, OUTPUT_IN_DEAD_INPUT, SHARED_LAST, Decision
from sglang_moe_patches.lab.predict import model_report, room
from sglang_moe_patches.lab.predict.config import ModelSizes
from sglang_moe_patches.lab.predict.engine_pools import Fit
from sglang_moe_patches.lab.predict.room import Need
from sglang_moe_patches.registry import CHANGES

ALL = {change.name: "applied" for change in CHANGES}
NOTHING = Decision(reason="there is nothing to do")
DECIDED = {
    "output-buffer": Decision((INPUTS_DROPPED,)),
    "deferred-shared-experts": Decision((SHARED_LAST,)),
    "moe-workspace": Decision((COLUMNS, OUTPUT_IN_DEAD_INPUT), width=1024),
}
"""Decisions of the changes for DeepSeek's layers with the sizes of Kimi-K2.5, on the Triton runner."""
LAYER = {
    **{"runner": "triton", "method": "UnquantizedFusedMoEMethod", "blocks": False},
    **{
        "experts": 384,
        "top_k": 8,
        "intermediate": 512,
        "shared_experts": True,
        "family": "deepseek_v2",
        "in_place": True,
    },
}
RESOLVED = {
    **{"tp_size": 4, "ep_size": 1, "dp_size": 1, "enable_dp_attention": False, "chunked_prefill_size": 16384},
    **{"moe_runner_backend": "auto", "moe_a2a_backend": "none", "disable_cuda_graph": True},
}


def asked(
    layer: dict[str, Any] | None = LAYER,
    changes: dict[str, str] = ALL,
    decided: dict[str, Decision] = DECIDED,
    **resolved: Any,
) -> dict[str, Any]:
    decisions = {
        change.name: asdict(decided.get(change.name, NOTHING)) for change in CHANGES if change.decide and layer
    }
    told = [
        {"name": name, "status": status, "reason": "", "decision": decisions.get(name)}
        for name, status in changes.items()
    ]
    return {"resolved": RESOLVED | resolved, "layer": layer, "unknown": "", "changes": told}


def advise(**facts: Any) -> dict[str, Any]:
    return model_report.derive_report(ModelSizes(MODELS["kimi-k2.5"]), asked(**facts))


WHOLE = {"moe-workspace": Decision(reason="it costs too much; SGLANG_X=1 cuts it all the same")}

GB = 10**9
FIT = Fit(150 * GB, 90 * GB, 0.9, given=False, tokens=450_000, token_bytes=100_000.0, context=100_000)
NEED = Need(2 * GB, {room.PREFILL: 5 * GB, room.SAMPLING: 1 * GB, room.PENALTIES: 3 * GB}, 1 * GB)
