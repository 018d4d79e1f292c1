"""Start one server of each kind of model that starts on a CPU. The server must do everything that ``doctor --model``
reports, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from common import plugins
from releases import ROOT
from servers import (
    ROUTED,
    SERVER,
    TRTLLM,
    ask_servers,
    check_doctor,
    make_server,
    prepend_to_path,
    read_observations,
    start_servers,
)
from sglang_moe_patches.lab.predict import model_report
from sglang_moe_patches.memory.kv_sizing import eligibility

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek": (ROUTED, {}),
    "DeepSeek, whose kernel routes": (TRTLLM, {"dense_layers": 0}),
    "DeepSeek on CuteDSL": ("flashinfer_cutedsl", {"dense_layers": 0}),
    "Qwen3": (ROUTED, {"family": "qwen3-moe"}),
    "GLM-4.5": (ROUTED, {"family": "glm4-moe"}),
    "MiniMax-M2": (ROUTED, {"family": "minimax-m2"}),
}
"""Value of ``--moe-runner-backend`` and options of the model, for each kind of model. Without a GPU, the engine has no
Triton runner, no Marlin runner, no quantization except NVFP4, and only the KV caches of MHA and MLA."""
FLAGS = ["--chunked-prefill-size", "64", "--max-running-requests", "3", "--context-length", "320"]
PROMPT = list(range(3, 203))


@pytest.mark.product
@pytest.mark.long("a server for each kind of model")
@pytest.mark.every_release
@pytest.mark.parametrize("kind", KINDS)
def test_a_started_server_runs_as_doctor_reported(kind: str, tmp_path: Path, checkpoint, monkeypatch) -> None:
    """A started server does what doctor reported about it. A stand-in for the GPU's driver lets the KV cache grow. CI
    does not run this test, because other tests compare doctor with one of these servers."""
    backend, options = KINDS[kind]
    model = checkpoint(**options)
    plugins.write_module(tmp_path / "plugin", "tells_memory", (ROOT / "test/standins/tells_memory.py").read_text())
    variables = {eligibility.KV_SIZING.name: "auto", eligibility.KV_MARGIN.name: str(eligibility.LEAST_MARGIN)}
    path = prepend_to_path(str(tmp_path / "plugin"))
    server = make_server("asked", model, tmp_path, *FLAGS, backend=backend, **variables, PYTHONPATH=path)
    limit = server._arguments.index("--max-total-tokens")
    del server._arguments[limit : limit + 2]
    with start_servers(server) as (running,):
        ask_servers(running, prompts=[PROMPT])
        ran, log = read_observations(running), running.log_text()
    for variable, value in {"SGLANG_MOE_PATCHES": "all", **variables}.items():
        monkeypatch.setenv(variable, value)
    report = model_report.examine(str(model), [*SERVER, backend, *FLAGS], "b200")  # a GPU with NVFP4
    check_doctor(report, ran, backend)
    assert report["server"]["tokens"] == 64
    (sizing,) = (row for row in report["changes"] if row["name"] == "kv-sizing")
    assert sizing["acts"] == ("KV cache grown from " in log), sizing
