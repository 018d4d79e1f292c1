"""A whole ``plan`` of a dense model's stock server on a GPU: every phase, both starts, verified.

With ``SGLANG_MOE_PATCHES=none`` nothing of the engine is changed, and the command is of use to any model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: what is planned is its memory", allow_module_level=True)

CONTEXT, CHUNK, REQUESTS = 32_768, 8192, 64
VOCABULARY = 128_256
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": CONTEXT,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SERVED = (
    *("--load-format", "dummy", "--skip-tokenizer-init", "--grammar-backend", "none", "--random-seed", "1"),
    *("--attention-backend", "triton", "--sampling-backend", "pytorch"),
    *("--chunked-prefill-size", str(CHUNK), "--max-running-requests", str(REQUESTS)),
)


def test_a_dense_model_of_the_stock_engine_is_planned(tmp_path: Path) -> None:
    model, output = tmp_path / "model", tmp_path / "report"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    command = [sys.executable, "-m", "sglang_moe_patches.cli", "plan", "--model", str(model), "--output", str(output)]
    command += ["--verify-seconds", "20", "--", *SERVED]
    done = subprocess.run(command, env={**os.environ, "SGLANG_MOE_PATCHES": "none"}, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    assert done.returncode in (0, 3)  # twenty seconds may not fill the KV cache
    (server,) = json.loads((output / "plan.json").read_text())["servers"]
    assert server["server"] == "stock"
    assert server["verified"]["held"]
    assert all("verification" in reason or "log-probabilities" in reason for reason in server["reasons"])
    assert any(name.startswith("captured decode") for name in server["record"]["driven"])
    assert server["second"]["tokens"] > server["first"]["tokens"]
