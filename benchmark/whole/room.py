"""Compare the memory need and KV cache size that ``doctor --model`` predicts with those of measured servers.

    python benchmark whole/room --json benchmark/results/room/0.5.12.post1.json

No server starts. The *need* is the memory of forward passes and CUDA graphs, in addition to weights and KV cache. The
script takes the servers of the installed release in benchmark/results/serving and first-starts whose need kv-sizing
measured. It asks the engine about each server, as ``doctor`` does. The result has the engine's answers. The page is
made from these answers and from the results of the measured servers.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import doctor_answers, dummy_models, dummy_servers, output
from memory import serving
from sglang_moe_patches.core import engine
from sglang_moe_patches.lab.predict import config, model_report
from sglang_moe_patches.lab.predict.room import NEED_ERROR

from whole import models

FIRST_STARTS = "first-starts"
FOLDERS = ("serving", FIRST_STARTS)
"""Folders of benchmark/results with measured servers."""
GPUS = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200"}
"""Name of each GPU model for ``doctor --gpu``, by the name that the driver reports."""
ADMITTED = re.compile(r"([\d,]+) requests run at once")
LAID_OUT_AT_ONCE = ("serving/gpt-oss-120b", "serving/gpt-oss-120b-30-layers")
"""Results of an earlier fp4-weights, which laid out all MXFP4 experts of a layer at once. Loading then left less memory
for the KV cache, so the KV cache size cannot be compared with today's prediction. The memory need can be compared."""
FACTS = ("model", "shard", "layers", "context", "chunk", "requests", "tp", "arguments")
"""Fields of a result that decide how much memory its servers need."""


def measured_servers(release: str) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Yield the stored servers of a release whose need kv-sizing measured: the result's name (``FOLDER/NAME``), the
    server's name, the result, and the server's figures.
    """
    for path in sorted(path for folder in FOLDERS for path in (output.RESULTS / folder).glob("*.json")):
        name = f"{path.parent.name}/{path.stem}"
        result = output.load(name)
        if result["conditions"]["engine"] != release:
            continue
        for server, figures in result["figures"]["servers"].items():
            if figures.get("growth"):
                yield name, server, result, figures


def describe_server(result: dict[str, Any]) -> dict[str, Any]:
    """Describe the servers of a result in the form that :func:`.doctor_answers.call_for_servers` takes."""
    figures = result["figures"]
    options = argparse.Namespace(**{name: figures[name] for name in FACTS}, quick=False)
    with tempfile.TemporaryDirectory() as folder:
        model = dummy_servers.write_model(Path(folder) / "model", options)
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    runner = dummy_models.RUNNERS.get(figures["model"], "triton")
    flags = ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--moe-runner-backend", runner]
    flags += ["--tp", str(figures["tp"]), "--chunked-prefill-size", str(figures["chunk"])]
    if figures["requests"]:
        flags += ["--max-running-requests", str(figures["requests"])]
    gpu = "h100" if figures.get("leave_free") else GPUS[result["conditions"]["gpu"]]
    return {"model": figures["model"], "config": config, "gpu": gpu, "flags": flags}


def ask(server: dict[str, Any]) -> dict[str, Any]:
    """Ask the engine about a server, and return the engine's answers. If the engine gives no answer, the dictionary has
    only the key ``refused`` with the reason.
    """
    try:
        return model_report.ask_engine(server["config"], server["flags"], server["gpu"])
    except model_report.CannotAsk as error:
        return {"refused": str(error)}


def admitted_requests(server: dict[str, Any]) -> int:
    """Read from a measured server's log how many requests could run at once. Return 0 if the log does not say it."""
    found = ADMITTED.search("\n".join(server["said"]))
    return int(found[1].replace(",", "")) if found else 0


# --- The page --------------------------------------------------------------------------------------------------------


def compare(answer: dict[str, Any], server: dict[str, Any]) -> tuple[dict[str, Any], float, float]:
    """Compare the prediction for a server with its measurement.

    :param answer: the engine's answers about the server.
    :param server: figures of the measured server.
    :returns: the predicted memory of the patched server (the key ``room`` of ``doctor``'s report), and the relative
        errors of the predicted need and of the predicted KV cache size.
    """
    asked = answer["asked"]
    sizes = config.read_sizes(answer["config"], answer["result"])
    requests = admitted_requests(server) // (asked["resolved"].get("pp_size") or 1)
    room = model_report.derive_report(sizes, asked, requests)["room"]["patched"]
    growth = server["growth"]
    return room, room["need"]["total"] / growth["need_bytes"] - 1, room["grown_tokens"] / growth["tokens"] - 1


def pair_servers(result: output.Result) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Yield for each server the engine's answers, the result that measured the server, and the server's figures. First
    starts that are not stored are left out.

    :param result: result of this benchmark.
    """
    measured = {(name, kind): (found, server) for name, kind, found, server in measured_servers(release_of(result))}
    for answer in result["figures"]["servers"]:
        key = answer["result"], answer["server"]
        if key in measured or not answer["result"].startswith(f"{FIRST_STARTS}/"):
            yield answer, *measured[key]


def make_tables(results: list[output.Result]) -> str:
    """Make a table with a row for each measured server. Above it, a sentence says how many predictions have an error
    of at most :data:`NEED_ERROR`.
    """
    rows, errors, token_errors = [], [], []
    for result in results:
        for answer, found, server in pair_servers(result):
            room, error, token_error = compare(answer, server)
            errors.append(abs(error))
            memory = ", an H100's free memory" if found["figures"].get("leave_free") else ""
            growth = server["growth"]
            tokens = f"-, {growth['tokens']:,}", "-"
            if answer["result"] not in LAID_OUT_AT_ONCE:
                token_errors.append(abs(token_error))
                tokens = f"{room['grown_tokens']:,}, {growth['tokens']:,}", f"{100 * token_error:+.0f} %"
            rows.append(
                (
                    f"{dummy_servers.run_label(found)}{memory}; {answer['server']}",
                    f"{room['requests']:,}",
                    f"{room['need']['total'] / 1e6:,.0f}, {growth['need_bytes'] / 1e6:,.0f}",
                    f"{100 * error:+.0f} %",
                    *tokens,
                )
            )
    within = sum(error <= NEED_ERROR for error in errors)
    line = (
        f"The need of {within} of {len(errors)} servers was predicted within {100 * NEED_ERROR:.0f} %, the KV cache of "
        f"{sum(error <= 0.05 for error in token_errors)} of {len(token_errors)} within 5 %. Where the table has *-*, "
        f"the server was measured before fp4-weights laid out experts in parts.\n\n"
    )
    header = (
        "server",
        "requests at once",
        "need in MB: predicted, measured",
        "error",
        "KV tokens: predicted, measured",
        "error",
    )
    return line + output.table(header, rows, left=1)


def release_of(result: output.Result) -> str:
    release: str = result["conditions"]["engine"]
    return release


def main() -> None:
    options = output.parse(output.parser(__doc__))
    release = engine.version()
    servers: list[dict[str, Any]] = []
    for name, kind, result, _ in measured_servers(release):
        server = describe_server(result)
        server["flags"] += result["figures"]["arguments"]
        changes = serving.kind_of(kind).changes
        selected = changes if changes == "all" else f"kv-sizing,{changes}"
        env = {"SGLANG_MOE_PATCHES_KV_SIZING": "always", "SGLANG_MOE_PATCHES": selected}
        servers.append(server | {"result": name, "server": kind, "env": env})
    answers: list[dict[str, Any]] = []
    found = output.result("room", {"servers": answers}, {"machine": "no GPU", "engine": release})
    for server, asked in doctor_answers.call_for_servers(servers, "whole.room:ask"):
        kept = {name: server[name] for name in ("result", "server", "config")}
        answers.append(kept | {"asked": models.keep_resolved(asked)})
        print(server["result"], asked.get("refused") or asked["unknown"], asked.get("fit"), flush=True)
        if options.json:
            output.write(options.json, found)
    output.finish(options, found, lambda result: make_tables([result]))
