"""Tests of the command ``growing_server.py``. The command fails unless the KV cache grew according to both ``/metrics``
and the server's info.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import growing_server
import pytest
from common.growth import Growth
from growing_server import NO_GPU, Start
from sglang_moe_patches.memory.kv_sizing import start
from sglang_moe_reference import environment

GREW, SHRANK = Growth(9, 4, 4_990_000_000), Growth(4, 9, 4_990_000_000)
LINE = "using the engine's default --mem-fraction-static 0.9000 because it's so"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tp", "2"],
        ["--mem-fraction-static", "0.3", "--tp", "2"],
        ["--tp", "2", "--mem-fraction-static=0.3"],
        ["--mem-fraction-static", "0.3", "--tp", "2", "--mem-fraction-static", "0.4"],
    ],
)
def test_a_given_memory_fraction_is_removed(arguments: list[str]):
    assert growing_server.remove_fraction(arguments) == ["--tp", "2"]


@pytest.mark.parametrize(("tokens", "sizing", "code"), [(9, GREW, 0), (4, GREW, 1), (9, None, 1), (4, SHRANK, 1)])
@pytest.mark.parametrize("gpu", [True, False])
def test_the_command_fails_if_the_kv_cache_did_not_grow(gpu, tokens, sizing, code, monkeypatch, tmp_path: Path, capsys):
    started: dict[str, Any] = {}

    def start_server(arguments, variables, output):
        started.update(variables, arguments=arguments)
        return Start(tokens, 21.4, sizing, [LINE])

    monkeypatch.setattr(growing_server, "start_server", start_server)
    monkeypatch.setattr(growing_server, "has_gpu", lambda: gpu)
    monkeypatch.setattr(environment, "variables", lambda environ: {environment.SWITCH: "1"})
    folder, page = tmp_path / "folder", tmp_path / "report.html"
    page.write_text("<table>\n<!-- overview --></table>\n<!-- bars --></div><!-- sections --><h2>Next</h2>")
    command = ["--model", "m", "--output", str(folder), "--report", str(page), "--", "--tp", "2"]
    assert growing_server.main(command) == code
    assert "--enable-metrics" in started["arguments"]
    assert started["SGLANG_MOE_PATCHES_KV_SIZING"] == "auto"
    assert (environment.SWITCH in started) == (not gpu)  # a stand-in replaces the driver only without a GPU
    assert (folder / "plugin/tells_memory.py").exists() == (not gpu)
    overview, _, section = page.read_text().partition("</table>")
    assert f"{tokens} tokens, " + ("which did not grow." if code else "4 by the engine's rule") in overview
    assert LINE.replace("'", "&#x27;") in section
    assert (NO_GPU in overview) == (NO_GPU in section) == (not gpu)
    bars = re.findall(r"width: ([\d.]+)%; background: var\(--(\w+)\)\"></span>(\d) tokens", section)
    assert bars == ([] if code else [("31.1", "stock", "4"), ("70.0", "patched", "9")])
    assert ("did not grow" in capsys.readouterr().err) == bool(code)


def test_lines_whose_figures_are_the_stand_ins_are_left_out_without_a_gpu():
    lines = [f"{beginning} 0 MB" for beginning in growing_server.NO_FIGURES] + [LINE]
    assert growing_server.select_lines(lines, gpu=False) == [LINE]
    assert growing_server.select_lines(lines, gpu=True) == lines
    logged = Path(start.__file__).read_text(encoding="utf-8")
    assert all(beginning in logged for beginning in growing_server.NO_FIGURES), "kv-sizing logs them in other words"
