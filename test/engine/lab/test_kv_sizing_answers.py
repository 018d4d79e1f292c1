"""What ``doctor --model`` says of kv-sizing, against what a server decides: each row of its page's table by flags."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from common import doctor_answers, plugins
from conftest import DEFAULT_ENGINE_ONLY
from releases import ROOT
from servers import figures, on_path, server, started
from sglang_moe_patches.lab.predict import config, model_report
from sglang_moe_patches.memory.kv_sizing import eligibility

EAGLE = "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1"
EAGLE += " --speculative-num-draft-tokens 4"
NGRAM = "--speculative-algorithm NGRAM"
ATTENTION = "--tp 2 --dp 2 --enable-dp-attention"
FLAGS = {
    "": "nothing is given",
    "--mem-fraction-static 0.8": "a fraction is given",
    "--max-total-tokens 100000": "tokens are given",
    EAGLE: "a rehearsed speculation",
    ATTENTION: "data-parallel attention",
    f"{EAGLE} --pp-size 2 --disable-overlap-schedule": "--pp-size",
    f"{EAGLE} --speculative-adaptive": "--speculative-adaptive",
    f"{EAGLE} --speculative-skip-dp-mlp-sync": "--speculative-skip-dp-mlp-sync",
    f"{NGRAM} --speculative-ngram-external-corpus-path x --speculative-ngram-external-sam-budget 1": "a corpus",
    "--speculative-algorithm DFLASH": "--speculative-algorithm",
    "--disaggregation-mode prefill": "--disaggregation-mode",
    "--attn-cp-size 2 --tp 2": "--attn-cp-size",
    "--moe-a2a-backend deepep --tp 2": "--moe-a2a-backend",
    "--enable-eplb --tp 2 --ep 2": "--enable-eplb",
    f"{ATTENTION} --enable-dp-attention-local-control-broadcast": "--enable-dp-attention-local-control-broadcast",
    f"{ATTENTION} --moe-dense-tp-size 1 --enable-dp-lm-head": "--moe-dense-tp-size",
    "--is-embedding": "--is-embedding",
    "--encoder-only": "--encoder-only",
    "--language-only --encoder-urls http://127.0.0.1:1": "--language-only",
    "--dllm-algorithm LowConfidence": "--dllm-algorithm",
    "--enable-pdmux --chunked-prefill-size -1 --disable-overlap-schedule": "--enable-pdmux",
    "--elastic-ep-backend mooncake": "--elastic-ep-backend",
    "--enable-lora --max-lora-rank 8 --lora-target-modules q_proj": "--enable-lora",
    "--enable-memory-saver": "--enable-memory-saver",
    "--cpu-offload-gb 1": "--cpu-offload-gb",
    "--enable-unified-memory": "--enable-unified-memory",
    "--keep-mm-feature-on-device": "--keep-mm-feature-on-device",
    "--offload-group-size 2": "--offload-group-size",
    "--enable-return-hidden-states": "--enable-return-hidden-states",
    "--enable-hisparse": "--enable-hisparse",
    "--enable-hierarchical-cache": "--enable-hierarchical-cache",
    "--enable-lmcache": "--enable-lmcache",
    "--enable-flexkv": "--enable-flexkv",
    "--radix-cache-backend flexkv": "--radix-cache-backend",
    "--enable-unified-cache-external-linker": "--enable-unified-cache-external-linker",
}
"""Command line -> the flag that it is a case of. A release that has no such flag refuses the server."""
SWITCHES = (*eligibility.ENGINE_SWITCHES, eligibility.SKIP_ALL_GATHER)


def row_of(report: dict[str, Any]) -> dict[str, Any]:
    return next(change for change in report["changes"] if change["name"] == "kv-sizing")


def agree(doctor: dict[str, Any], server: dict[str, Any]) -> bool:
    """Whether doctor's row says what the server decided, and by the same reason."""
    if "refused" in doctor or "refused" in server:
        return "refused" in doctor and "refused" in server
    row = row_of(doctor)
    if "skipped" in server:
        return not row["acts"] and row["reason"].endswith(f"because {server['skipped']}")
    if "monitored" in server:
        return not row["acts"] and f"because {server['monitored']}; free memory is recorded" in row["reason"]
    return row["acts"] and ("is used unchanged" in row["does"]) == server["kept"]


def test_every_flag_of_the_table_is_a_case():
    flags = {flag for given in FLAGS for flag in re.findall(r"--[\w-]+", given)}
    assert {*eligibility.INELIGIBLE, *eligibility.MONITOR_ONLY} <= flags


@pytest.mark.every_release
def test_doctor_says_of_each_server_what_its_own_process_would_decide():
    model = config.load_model("Qwen/Qwen3-30B-A3B-FP8")[0]
    common = {"model": "m", "config": model, "gpu": "h200", "env": {}}
    servers = [common | {"flags": flags.split()} for flags in FLAGS]
    for switch in SWITCHES:
        servers.append(common | {"flags": ATTENTION.split(), "env": {switch: "1"}})
    answers = list(doctor_answers.ask_each(servers, "engine_resolution:compare_kv_sizing"))
    assert [
        (asked["flags"], answer) for asked, answer in answers if not agree(answer["doctor"], answer["engine"])
    ] == []
    decisions = [answer["engine"] for _, answer in answers if "refused" not in answer["engine"]]
    assert len(decisions) > 20
    assert {key for decision in decisions for key in decision} == {"skipped", "monitored", "kept"}


#: Servers that start on a CPU.
STARTED = {
    "hidden states": (["--enable-return-hidden-states"], {}),
    "CPU offload": (["--cpu-offload-gb", "1"], {}),
    "hierarchical cache": (["--enable-hierarchical-cache"], {}),
    "LoRA": (["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj"], {}),
    "sized by the engine": ([], {"SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "1"}),
    "embedding": (["--is-embedding"], {}),
}


@DEFAULT_ENGINE_ONLY
@pytest.mark.parametrize(
    "case", [name if name == "hidden states" else pytest.param(name, marks=pytest.mark.product) for name in STARTED]
)
def test_a_started_server_decides_what_doctor_said(case, tmp_path: Path, checkpoint, monkeypatch):
    """A stand-in says that there is a GPU; all else is the server's."""
    flags, variables = STARTED[case]
    sizing = {"SGLANG_MOE_PATCHES_KV_SIZING": "auto", **variables}
    plugins.write_module(tmp_path / "plugin", "tells_memory", (ROOT / "test/standins/tells_memory.py").read_text())
    path = {"PYTHONPATH": on_path(str(tmp_path / "plugin"))}
    model = checkpoint()
    with started(server("asked", model, tmp_path, *flags, **sizing, **path)) as (running,):
        (reason,) = (why for name, _, why in figures(running).changes if name == "kv-sizing")
    for name, value in {"SGLANG_MOE_PATCHES": "all", **sizing}.items():
        monkeypatch.setenv(name, value)
    row = row_of(model_report.examine(str(model), flags, "b200"))  # the checkpoint is NVFP4
    assert reason
    assert row["reason"] == f"the engine's fraction is used because {reason}"
