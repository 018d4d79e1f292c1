"""Compare the report of ``doctor`` about kv-sizing with the decision of a server, for each row of the tables in
docs/changes/kv-sizing.md."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import unsized_servers
from common import doctor_answers, plugins
from conftest import RELEASE
from releases import DEFAULT, ROOT
from servers import ROUTED, Server, make_server, prepend_to_path, read_observations, start_servers
from sglang_moe_patches.lab.predict import config, model_report
from sglang_moe_patches.memory.kv_sizing import eligibility
from unsized_servers import ATTENTION, EAGLE

COMMAND_LINES = [
    *("", "--mem-fraction-static 0.8", "--max-total-tokens 100000", EAGLE, ATTENTION),
    *unsized_servers.command_lines(),
]
SWITCHES = tuple(kind.name for kind in eligibility.UNSIZED if not kind.name.startswith("--"))


def row_of(report: dict[str, Any]) -> dict[str, Any]:
    """Return the row of ``doctor``'s report that describes kv-sizing."""
    return next(change for change in report["changes"] if change["name"] == "kv-sizing")


def is_consistent(doctor: dict[str, Any], server: dict[str, Any]) -> bool:
    """Return whether ``doctor`` and the server make the same decision about kv-sizing, for the same reason."""
    if "refused" in doctor or "refused" in server:
        return "refused" in doctor and "refused" in server
    row = row_of(doctor)
    if reason := server.get("skipped") or server.get("kept"):
        return not row["acts"] and row["reason"].endswith(f"because {reason}")
    return row["acts"]


@pytest.mark.long("the arguments of about fifty servers are resolved twice")
@pytest.mark.every_release
def test_doctor_and_the_servers_process_make_the_same_decision():
    model = config.load_model("Qwen/Qwen3-30B-A3B-FP8")[0]
    common = {"model": "m", "config": model, "gpu": "h200", "env": {}}
    servers = [common | {"flags": flags.split()} for flags in COMMAND_LINES]
    for switch in SWITCHES:
        servers.append(common | {"flags": ATTENTION.split(), "env": {switch: "1"}})
    answers = list(doctor_answers.call_for_servers(servers, "engine_resolution:compare_kv_sizing"))
    assert [
        (question["flags"], answer)
        for question, answer in answers
        if not is_consistent(answer["doctor"], answer["engine"])
    ] == []
    decisions = [answer["engine"] for _, answer in answers if "refused" not in answer["engine"]]
    assert len(decisions) > 20
    assert {key for decision in decisions for key in decision} == {"skipped", "kept", "sized"}


@dataclass(frozen=True)
class Case:
    """Server that starts on a CPU.

    :param flags: server arguments.
    :param variables: environment variables.
    :param stand_ins: plugins that stand in for parts of a GPU. Every server also has the plugin ``tells_memory``, which
        simulates the GPU's free memory.
    :param runs: whether the server can run a forward pass on a CPU. Otherwise it only starts.
    :param backend: MoE runner.
    :param model: arguments of the fixture ``checkpoint``.
    :param removed: default server arguments of the tests that this server must not have.
    :param fails_on: reason why the engine ends this server. The key is the release on which the server ends.
    """

    flags: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    stand_ins: tuple[str, ...] = ()
    runs: bool = True
    backend: str = ROUTED
    model: dict[str, Any] = field(default_factory=dict)
    removed: str = ""
    fails_on: dict[str, str] = field(default_factory=dict)


ONE_STEP = "--speculative-algorithm EAGLE --speculative-num-steps 1 --speculative-eagle-topk 1"
ONE_STEP += " --speculative-num-draft-tokens 2 --speculative-draft-attention-backend triton"
STARTED = {
    "decode": Case("--disaggregation-mode decode --disaggregation-transfer-backend fake"),
    "adaptive": Case(
        # 0.5.11 adapts only without the overlap scheduler. It is off on a CPU, so doctor must get the flag, too.
        f"{ONE_STEP} --speculative-adaptive --disable-overlap-schedule",
        stand_ins=("no_driver",),
        runs=False,
        model={"nextn": True},
    ),
    "all-to-all": Case(
        "--moe-a2a-backend megamoe",
        runs=False,
        backend="triton",
        model={"quantized": False},
        removed="--quantization modelopt_fp4",
        fails_on={
            "0.5.11": "it does not have this backend",
            "0.5.17": "one rank writes into a view of itself when it gathers (dp_attn.py, all_gather)",
            "0.5.23": "it rejects the arguments without such a GPU (mega_moe_hook.py)",
        },
    ),
    "EPLB": Case("--enable-eplb --tp 2 --ep 2"),
    "embedding": Case("--is-embedding", runs=False),  # only newer releases compute embeddings with this model
    "broadcast": Case(f"{ATTENTION} --enable-dp-attention-local-control-broadcast", stand_ins=("gathers_on_cpu",)),
    "CPU offload": Case("--cpu-offload-gb 1"),
    "LoRA": Case(
        "--enable-lora --max-lora-rank 8 --lora-target-modules q_proj --lora-backend torch_native",
        stand_ins=("no_driver",),
    ),
    "hidden states": Case("--enable-return-hidden-states"),
    "hierarchical cache": Case(
        "--enable-hierarchical-cache --hicache-ratio 1.1 --hicache-write-policy write_back",
        stand_ins=("no_driver",),
        removed="--disable-radix-cache",
    ),
    "capturer": Case("--enable-return-routed-experts", stand_ins=("no_driver",)),
    "Rust": Case(variables={"SGLANG_RUST_SERVER": "1"}),
}
"""Servers that the test starts. The key is the server's name. Each server belongs to a row in the tables of
docs/changes/kv-sizing.md: the row names a flag or a variable of the server. :data:`TESTED_ELSEWHERE` has the rows
without a server."""
TESTED_ELSEWHERE = {
    "`--dcp-size`": "no server with its flags starts on a CPU; a unit test compares page and table of flags",
    "`--enable-priority-scheduling`": "a unit test has the flag, and the server starts as other servers do",
    "`--speculative-skip-dp-mlp-sync`": "a unit test has the flag, and the server starts as the adaptive one",
    "`--speculative-ngram-external-corpus-path`": "a unit test has the flag, and the server starts as the adaptive one",
    "`--pp-size`": "a unit test has the flag, and the server starts as the adaptive one",
    "`--use-ray`": "a unit test has the flag, and Ray is not installed with the engine",
    "several machines": "another machine's arguments are known only when it answers",
    "a KV cache of another kind": "its pools have no reference kernels",
    "CUDA graphs of the vision model": "a unit test computes the allowance",
    "a GPU that shares": "the CPU has no such properties",
    "`--max-total-tokens` allows": "the engine test of the user's limits starts one",
    "a [kind of forward pass](#what-is-rehearsed) was not": "the engine tests of rehearsals that fail start them",
    "`SGLANG_ENABLE_POST_CAPTURE_KV_SIZING`": "the engine decides by the GPU whether it sizes",
}
"""Rows in the tables of kv-sizing's page for which this file starts no server. A key is the beginning of a row. Its
value is the reason, or the test that covers the row."""


def rows_of_the_page() -> list[str]:
    """Return the first cell of each row in the tables of docs/changes/kv-sizing.md that list the servers with the
    engine's own KV cache size."""
    page = (ROOT / "docs/changes/kv-sizing.md").read_text()
    tables = page.partition("## When it does nothing")[2].partition("<!-- figures:recipes-kv-sizing -->")[0]
    headers = ("---", "server")
    cells = re.findall(r"^\| (.+?) \|", tables, re.MULTILINE)
    return [cell for cell in cells if cell not in headers]


def test_each_row_of_the_page_has_a_server_or_a_reason():
    rows = rows_of_the_page()
    assert len(rows) > 15
    names_of_servers = [re.findall(r"--[\w-]+", case.flags) + list(case.variables) for case in STARTED.values()]
    by_flags = {row for row in rows for names in names_of_servers if any(f"`{name}`" in row for name in names)}
    elsewhere = {row for row in rows if row.startswith(tuple(TESTED_ELSEWHERE))}
    assert by_flags | elsewhere == set(rows)
    assert len(elsewhere) == len(TESTED_ELSEWHERE)


def decision_reason(running: Server, log: str) -> str:
    """Return the reason why a server uses the engine's own ``--mem-fraction-static``. The reason is in the status of
    kv-sizing, or in the log."""
    (reason,) = {reason for name, _, reason in read_observations(running).changes if name == "kv-sizing"}
    logged = re.findall(r"kv-sizing: using the engine's default --mem-fraction-static \S+ because (.+)", log)
    return reason or logged[0]


@pytest.mark.long("a server for each row of the page")
@pytest.mark.every_release
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.ci if (name, RELEASE) == ("hidden states", DEFAULT) else pytest.mark.product
        )
        for name in STARTED
    ],
)
def test_a_started_server_decides_as_doctor_predicts(name, tmp_path: Path, checkpoint, monkeypatch):
    """The server keeps the engine's KV cache size, and gives the same reason as ``doctor``. Stand-ins simulate a GPU
    and its free memory. Everything else is the engine's own code."""
    case = STARTED[name]
    if RELEASE in case.fails_on:
        pytest.skip(f"SGLang {RELEASE} ends this server: {case.fails_on[RELEASE]}")
    sizing = {"SGLANG_MOE_PATCHES_KV_SIZING": "auto", **case.variables}
    sizing |= {eligibility.KV_MARGIN.name: eligibility.KV_MARGIN.default}  # the stand-in reads it
    for stand_in in ("tells_memory", *case.stand_ins):
        plugins.write_module(tmp_path / "plugin", stand_in, (ROOT / f"test/standins/{stand_in}.py").read_text())
    environment = {"PYTHONPATH": prepend_to_path(str(tmp_path / "plugin"))}
    flags = case.flags.split()
    if not case.runs:
        flags.append("--skip-server-warmup")
        environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    model = checkpoint(**case.model)
    process = make_server("asked", model, tmp_path, *flags, backend=case.backend, **sizing, **environment)
    for argument in case.removed.split():
        process._arguments.remove(argument)
    with start_servers(process) as (running,):
        reason = decision_reason(running, running.log_text())
    for variable, value in {"SGLANG_MOE_PATCHES": "all", **sizing}.items():
        monkeypatch.setenv(variable, value)
    row = row_of(model_report.examine(str(model), flags, "b200"))  # a GPU with NVFP4
    assert reason
    assert not row["acts"]
    assert row["reason"] == f"the engine's --mem-fraction-static is used because {reason}"
