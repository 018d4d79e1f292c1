"""What ``doctor --model`` says of kv-sizing, against what a server decides: each row of its page's table by flags."""

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
from servers import ROUTED, Server, figures, on_path, server, started
from sglang_moe_patches.lab.predict import config, model_report
from sglang_moe_patches.memory.kv_sizing import eligibility
from unsized_servers import ATTENTION, EAGLE

COMMAND_LINES = [
    *("", "--mem-fraction-static 0.8", "--max-total-tokens 100000", EAGLE, ATTENTION),
    *unsized_servers.command_lines(),
]
SWITCHES = tuple(kind.name for kind in eligibility.UNSIZED if not kind.name.startswith("--"))


def row_of(report: dict[str, Any]) -> dict[str, Any]:
    return next(change for change in report["changes"] if change["name"] == "kv-sizing")


def agree(doctor: dict[str, Any], server: dict[str, Any]) -> bool:
    """Whether doctor's row says what the server decided, and by the same reason."""
    if "refused" in doctor or "refused" in server:
        return "refused" in doctor and "refused" in server
    row = row_of(doctor)
    if reason := server.get("skipped") or server.get("kept"):
        return not row["acts"] and row["reason"].endswith(f"because {reason}")
    return row["acts"]


@pytest.mark.long("about fifty servers, of which each is resolved twice")
@pytest.mark.every_release
def test_doctor_says_of_each_server_what_its_own_process_would_decide():
    model = config.load_model("Qwen/Qwen3-30B-A3B-FP8")[0]
    common = {"model": "m", "config": model, "gpu": "h200", "env": {}}
    servers = [common | {"flags": flags.split()} for flags in COMMAND_LINES]
    for switch in SWITCHES:
        servers.append(common | {"flags": ATTENTION.split(), "env": {switch: "1"}})
    answers = list(doctor_answers.ask_each(servers, "engine_resolution:compare_kv_sizing"))
    assert [
        (asked["flags"], answer) for asked, answer in answers if not agree(answer["doctor"], answer["engine"])
    ] == []
    decisions = [answer["engine"] for _, answer in answers if "refused" not in answer["engine"]]
    assert len(decisions) > 20
    assert {key for decision in decisions for key in decision} == {"skipped", "kept", "sized"}


@dataclass(frozen=True)
class Case:
    """A server that starts on a CPU.

    :param stand_ins: plugins beside the one that tells of memory, for what only a GPU has.
    :param runs: it can run a forward there; else it is started and asked nothing.
    :param model: as ``checkpoint`` takes it.
    :param left_out: of what every server of these tests is given.
    :param fails_on: by release, why the engine itself ends this server there.
    """

    flags: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    stand_ins: tuple[str, ...] = ()
    runs: bool = True
    backend: str = ROUTED
    model: dict[str, Any] = field(default_factory=dict)
    left_out: str = ""
    fails_on: dict[str, str] = field(default_factory=dict)


ONE_STEP = "--speculative-algorithm EAGLE --speculative-num-steps 1 --speculative-eagle-topk 1"
ONE_STEP += " --speculative-num-draft-tokens 2 --speculative-draft-attention-backend triton"
STARTED = {
    "decode": Case("--disaggregation-mode decode --disaggregation-transfer-backend fake"),
    "adaptive": Case(
        # 0.5.11 adapts only without the overlap scheduler, which is off on a CPU: doctor must be asked the same.
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
        left_out="--quantization modelopt_fp4",
        fails_on={
            "0.5.11": "it has no such back end",
            "0.5.17": "one rank writes into a view of itself when it gathers (dp_attn.py, all_gather)",
            "0.5.23": "its arguments are refused without such a GPU (mega_moe_hook.py)",
        },
    ),
    "EPLB": Case("--enable-eplb --tp 2 --ep 2"),
    "embedding": Case("--is-embedding", runs=False),  # this model embeds on newer releases alone
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
        left_out="--disable-radix-cache",
    ),
    "capturer": Case("--enable-return-routed-experts", stand_ins=("no_driver",)),
    "Rust": Case(variables={"SGLANG_RUST_SERVER": "1"}),
}
"""At least one of each row of the page's tables that names a flag or a variable."""
ASKED_OTHERWISE = {
    "`--dcp-size`": "none of its flags starts on a CPU, and a unit test compares the page with the table of flags",
    "`--enable-priority-scheduling`": "it starts as other servers do, and a unit test asks for the flag",
    "`--speculative-skip-dp-mlp-sync`": "it starts as the adaptive one, and a unit test asks for the flag",
    "`--speculative-ngram-external-corpus-path`": "it starts as the adaptive one, and a unit test asks for the flag",
    "`--pp-size`": "it starts as the adaptive one, and a unit test asks for the flag",
    "`--use-ray`": "Ray is not installed with the engine, and a unit test asks for the flag",
    "several machines": "what another machine runs is known when it answers",
    "a KV cache of another kind": "its pools have no reference kernels",
    "graphs of the vision model": "a unit test asks the allowance",
    "a GPU that shares": "the CPU has no such properties",
    "`--max-total-tokens` allows": "the engine test of the user's limits starts one",
    "a phase was not reached": "the engine tests of rehearsals that fail start them",
    "`SGLANG_ENABLE_POST_CAPTURE_KV_SIZING`": "the engine decides by the GPU whether it sizes",
}
"""Rows of which doctor says nothing by a server's arguments, by how they begin: why, and the test that starts one."""


def rows_of_the_page() -> list[str]:
    """The first cells of the tables that say when the engine's default applies."""
    page = (ROOT / "docs/changes/kv-sizing.md").read_text()
    tables = page.partition("## When it does nothing")[2].partition("Of the [published recipes]")[0]
    headers = ("---", "server")
    cells = re.findall(r"^\| (.+?) \|", tables, re.MULTILINE)
    return [cell for cell in cells if cell not in headers]


def test_one_server_of_each_row_of_the_page_is_started():
    rows = rows_of_the_page()
    assert len(rows) > 15
    shown = [re.findall(r"--[\w-]+", case.flags) + list(case.variables) for case in STARTED.values()]
    by_flags = {row for row in rows for names in shown if any(f"`{name}`" in row for name in names)}
    otherwise = {row for row in rows if row.startswith(tuple(ASKED_OTHERWISE))}
    assert by_flags | otherwise == set(rows)
    assert len(otherwise) == len(ASKED_OTHERWISE)


def decided(running: Server, log: str) -> str:
    """Why the engine's fraction is used: by the change's status, or by what the scheduler logs."""
    (reason,) = {why for name, _, why in figures(running).changes if name == "kv-sizing"}
    logged = re.findall(r"kv-sizing: using the engine's default fraction \S+ because (.+)", log)
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
def test_a_started_server_decides_what_doctor_said(name, tmp_path: Path, checkpoint, monkeypatch):
    """Stand-ins say that there is a GPU, and how much of it is free; all else is the server's."""
    case = STARTED[name]
    if RELEASE in case.fails_on:
        pytest.skip(f"SGLang {RELEASE} ends this server: {case.fails_on[RELEASE]}")
    sizing = {"SGLANG_MOE_PATCHES_KV_SIZING": "auto", **case.variables}
    sizing |= {eligibility.KV_MARGIN.name: eligibility.KV_MARGIN.default}  # the stand-in reads it
    for stand_in in ("tells_memory", *case.stand_ins):
        plugins.write_module(tmp_path / "plugin", stand_in, (ROOT / f"test/standins/{stand_in}.py").read_text())
    started_with = {"PYTHONPATH": on_path(str(tmp_path / "plugin"))}
    flags = case.flags.split()
    if not case.runs:
        flags.append("--skip-server-warmup")
        started_with["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    model = checkpoint(**case.model)
    asked = server("asked", model, tmp_path, *flags, backend=case.backend, **sizing, **started_with)
    for given in case.left_out.split():
        asked._arguments.remove(given)
    with started(asked) as (running,):
        why = decided(running, running.log_text())
    for variable, value in {"SGLANG_MOE_PATCHES": "all", **sizing}.items():
        monkeypatch.setenv(variable, value)
    row = row_of(model_report.examine(str(model), flags, "b200"))  # has NVFP4
    assert why
    assert not row["acts"]
    assert row["reason"] == f"the engine's fraction is used because {why}"
