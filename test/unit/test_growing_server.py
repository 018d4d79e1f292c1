"""The last part of `make demo` ends well only where the KV cache has grown, by the log and by the server."""

from __future__ import annotations

from pathlib import Path

import growing_server
import pytest
from growing_server import Start
from sglang_moe_reference import environment

GROWN = "9 KV tokens instead of 4; forwards need 4,990 MB, 2,000 MB of margin stay free"
SHRUNK = "4 KV tokens instead of 9; forwards need 4,990 MB, 2,000 MB of margin stay free"
RULE = "using the engine's default fraction 0.9000 because it's so"


@pytest.mark.parametrize(
    "given",
    [
        ["--tp", "2"],
        ["--mem-fraction-static", "0.3", "--tp", "2"],
        ["--tp", "2", "--mem-fraction-static=0.3"],
        ["--mem-fraction-static", "0.3", "--tp", "2", "--mem-fraction-static", "0.4"],
    ],
)
def test_growing_server_sets_no_fraction_that_would_pin_the_kv_cache(given: list[str]):
    assert growing_server.without_fraction(given) == ["--tp", "2"]


@pytest.mark.parametrize(
    ("tokens", "line", "code"),
    [(9, GROWN, 0), (4, GROWN, 1), (9, RULE, 1), (4, SHRUNK, 1)],
)
@pytest.mark.parametrize("gpu", [True, False])
def test_a_server_that_has_not_grown_is_a_failure(gpu, tokens, line, code, monkeypatch, tmp_path: Path, capsys):
    """Only without a GPU has it the stand-in."""
    given = {}

    def start_server(arguments, variables, output):
        given.update(variables)
        return Start(tokens, 21.4, [line])

    monkeypatch.setattr(growing_server, "start_server", start_server)
    monkeypatch.setattr(growing_server, "has_gpu", lambda: gpu)
    monkeypatch.setattr(environment, "variables", lambda environ: {environment.SWITCH: "1"})
    folder, page = tmp_path / "folder", tmp_path / "report.html"
    page.write_text("<table>\n<!-- overview --></table>\n<!-- sections --><h2>Next</h2>")
    command = ["--model", "m", "--output", str(folder), "--report", str(page), "--", "--tp", "2"]
    assert growing_server.main(command) == code
    assert given["SGLANG_MOE_PATCHES_KV_SIZING"] == "auto"
    assert (environment.SWITCH in given) == (not gpu)
    assert (folder / "plugin/tells_memory.py").exists() == (not gpu)
    overview, _, section = page.read_text().partition("</table>")
    assert f"{tokens} tokens, " + ("which did not grow." if code else "4 by the engine's rule") in overview
    assert line.replace("'", "&#x27;") in section
    assert ("is a stand-in's" in overview) == ("is a stand-in's" in section) == (not gpu)
    assert ("has not grown" in capsys.readouterr().err) == bool(code)
