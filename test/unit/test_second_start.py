"""The last part of `make demo`: it ends well only where the second start was sized by the record of the first."""

from __future__ import annotations

from pathlib import Path

import pytest
import second_start
from second_start import Start
from sglang_moe_patches.lab.reference import environment

RECORDED = "[2026-11-23 07:11:25 TP0] sglang-moe-patches: kv-sizing: 0.9009 instead of 0.9000: 9 tokens"
RULE = "[2026-11-23 07:11:25] sglang-moe-patches: kv-sizing: using the engine's default fraction 0.9000: no record"


@pytest.mark.parametrize(
    "given",
    [
        ["--tp", "2"],
        ["--mem-fraction-static", "0.3", "--tp", "2"],
        ["--tp", "2", "--mem-fraction-static=0.3"],
        ["--mem-fraction-static", "0.3", "--tp", "2", "--mem-fraction-static", "0.4"],
    ],
)
def test_a_fraction_that_would_stand_is_left_out(given: list[str]):
    assert second_start.without_fraction(given) == ["--tp", "2"]


@pytest.mark.parametrize(
    ("tokens", "log", "code"), [((4, 9), RECORDED, 0), ((4, 4), RULE, 1), ((4, 9), RULE, 1), ((4, 4), RECORDED, 1)]
)
@pytest.mark.parametrize("gpu", [True, False])
def test_a_second_start_by_the_rule_is_a_failure(gpu, tokens, log, code, monkeypatch, tmp_path: Path, capsys):
    """Both starts have one record; only without a GPU do they have the stand-in."""
    started = []

    def start(name, arguments, variables, output):
        started.append((name, variables))
        return Start(name, tokens[len(started) - 1], 21.4, second_start.said(log))

    monkeypatch.setattr(second_start, "start", start)
    monkeypatch.setattr(second_start, "has_gpu", lambda: gpu)
    monkeypatch.setattr(environment, "variables", lambda environ: {environment.SWITCH: "1"})
    folder, page = tmp_path / "folder", tmp_path / "report.html"
    page.write_text("<table>\n<!-- overview --></table>\n<!-- sections --><h2>Next</h2>")
    command = ["--model", "m", "--output", str(folder), "--report", str(page), "--", "--tp", "2"]
    assert second_start.main(command) == code
    assert [name for name, _ in started] == ["first", "second"]
    assert started[0][1] == started[1][1]
    variables = started[0][1]
    assert variables["SGLANG_MOE_PATCHES_KV_SIZING"] == "auto"
    assert variables["SGLANG_MOE_PATCHES_KV_RECORD"] == str(folder / "records.json")
    assert (environment.SWITCH in variables) == (not gpu)
    assert ("standins" in variables.get("PYTHONPATH", "")) == (not gpu)
    overview, _, section = page.read_text().partition("</table>")
    said = f"{tokens[0]} tokens at the first start, {tokens[1]} at the second, "
    assert said + ("not sized by a record." if code else "sized by the record of the first.") in overview
    assert second_start.said(log)[0].removeprefix(second_start.SAYS).replace("'", "&#x27;") in section
    assert ("is a stand-in's" in overview) == ("is a stand-in's" in section) == (not gpu)
    assert ("is not sized by the record" in capsys.readouterr().err) == bool(code)
