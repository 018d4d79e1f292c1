"""GPU tests of model families for which this package has no special code. With the engine's own kernels, patched
answers equal stock answers.

Each family runs in a process of its own. The engine's model runner builds four layers with a model's widths, few
experts and dummy weights. The model runs one prefill and then decodes. The expert outputs of the prefill are large
enough for column slices.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: the engine's Triton runner does not run on the CPU", allow_module_level=True)

from sglang_moe_patches.changes.moe_workspace.column_slices import MOE_WORKSPACE_MB  # noqa: E402

ROOT = Path(__file__).parents[2]
TOKENS, STEPS, LAYERS = 16384, 4, 4
PREFILL_GRAPHS = ("disable_piecewise_cuda_graph", "disable_prefill_cuda_graph")
"""Argument that disables CUDA graphs of prefills, under its names in different releases."""
WIDE = {"max_position_embeddings": 32768, "vocab_size": 4096, "num_hidden_layers": LAYERS}
#: Models with the widths and the top-k of gpt-oss-120b, Qwen3-Next-80B, Ling-lite and Qwen1.5-MoE, and with few
#: experts. The experts have the width of one rank of TP=8, 4, 8 and 4, so that their activation fits into a layer's
#: dead input (its input, once no code reads it any more).
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt-oss": {
        **{"hidden_size": 2880, "intermediate_size": 384, "num_local_experts": 16, "num_experts_per_tok": 4},
        **{"num_attention_heads": 16, "num_key_value_heads": 4, "sliding_window": 128},
    },
    "qwen3-next": {
        **{"hidden_size": 2048, "moe_intermediate_size": 128, "num_experts": 32, "num_experts_per_tok": 10},
        **{"shared_expert_intermediate_size": 128, "num_attention_heads": 8, "head_dim": 256},
        **{"linear_num_value_heads": 8, "linear_num_key_heads": 4},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    },
    "bailing-moe": {
        **{"hidden_size": 2048, "moe_intermediate_size": 192, "num_experts": 32, "num_experts_per_tok": 6},
        **{"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128},
    },
    # The runner of this model works out of place from 0.5.15.post1 on, because the shared expert's gate reads its
    # input.
    "qwen2-moe": {
        **{"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_size": 2048},
        **{"moe_intermediate_size": 352, "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": False},
        **{"intermediate_size": 1408, "shared_expert_intermediate_size": 1408, "decoder_sparse_step": 1},
        **{"num_attention_heads": 16, "num_key_value_heads": 16, "qkv_bias": True, "mlp_only_layers": []},
        **{"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "torch_dtype": "bfloat16"},
        **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "tie_word_embeddings": False},
    },
}


def run_family(name: str, folder: Path) -> dict[str, Any]:
    from architectures import CONFIGS, register_config
    from common.in_process import InProcess
    from sglang.srt.server_args import ServerArgs
    from sglang_moe_patches.changes import deferred_shared_experts, moe_workspace, output_buffer
    from sglang_moe_patches.core.patch import Patcher, Status, probe
    from sglang_moe_patches.lab.observers import counting
    from sglang_moe_patches.lab.observers.events import ChangeStatus
    from sglang_moe_reference.families import ModelSpec
    from sglang_moe_reference.model import _json_files, tokenizer_json

    config = {k: v for k, v in {**CONFIGS.get(name, {}), **WIDE, **FAMILIES[name]}.items() if not k.endswith("_cpu")}
    register_config(config["model_type"])
    for file, content in {**_json_files(ModelSpec(), False), "config.json": config}.items():
        (folder / file).write_text(json.dumps(content))
    (folder / "tokenizer.json").write_text(tokenizer_json())
    engine = InProcess(
        folder,
        quantization=None,
        moe_runner_backend="triton",
        device="cuda",
        attention_backend="triton",
        load_format="dummy",
        **{name: True for name in PREFILL_GRAPHS if name in ServerArgs.__dataclass_fields__},
        max_total_tokens=2 * TOKENS + 4096,
    )

    def use(model: Any) -> None:
        engine.runner.model = model
        engine.runner.req_to_token_pool.clear()
        engine.runner.token_to_kv_pool_allocator.clear()

    setattr(engine, "_use", use)  # noqa: B010
    prompt = [(7 * i) % 4000 + 3 for i in range(TOKENS)]

    def measure(model: Any) -> tuple[list[list[int]], Any, int]:
        engine.generate(model, [prompt], 0)  # compiles the kernels
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        tokens, logits = engine.generate(model, [prompt], STEPS)
        return tokens, logits.cpu(), torch.cuda.max_memory_allocated() - before

    changes = (output_buffer.CHANGE, deferred_shared_experts.CHANGE, moe_workspace.CHANGE)
    stock = measure(engine.runner.model)
    statuses = [ChangeStatus(change.name, Status.APPLIED, "") for change in changes]
    tally = counting.Tally([count for counts in counting.active_counts(statuses).values() for count in counts])
    patcher = Patcher()
    for change in changes:
        plan = probe(change)
        assert plan.install is not None, f"{change.name}: {plan.reason}"
        plan.install(patcher)
    tally.install(patcher)
    patched = measure(engine.load(folder))
    return {
        "tokens": stock[0] == patched[0],
        "logits": torch.equal(stock[1], patched[1]),
        "distinct": stock[1].unique().numel(),
        "in_place": getattr(_find_first_moe_layer(engine.runner.model).moe_runner_config, "inplace", False),
        "peak": [round(one[2] / 1e6, 1) for one in (stock, patched)],
        "acted": counting.describe_actions(statuses, tally.acted),
    }


def _find_first_moe_layer(model: Any) -> Any:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    return next(module for module in model.modules() if isinstance(module, FusedMoE))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_without_a_special_case_offers_and_answers_as_stock(name, tmp_path):
    paths = [ROOT / "python", ROOT / "benchmark", ROOT / "test" / "engine", ROOT / "test" / "tools"]
    done = subprocess.run(
        [sys.executable, __file__, name, str(tmp_path)],
        env={
            **os.environ,
            "SGLANG_MOE_PATCHES": "none",
            MOE_WORKSPACE_MB.name: "250",
            "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(name, found)
    assert found["tokens"], found
    assert found["logits"], found
    assert found["distinct"] > 100
    assert f"offered the dead input in {LAYERS - 1} of {LAYERS} MoE layers" in " ".join(found["acted"])
    if name != "gpt-oss":  # gpt-oss has an activation with a clamp of its own
        did = "took the dead input as scratch memory" if found["in_place"] else "wrote the output into the dead input"
        assert f"{did} in {LAYERS - 1} of {LAYERS}" in " ".join(found["acted"])


if __name__ == "__main__":
    print(json.dumps(run_family(sys.argv[1], Path(sys.argv[2]))))
