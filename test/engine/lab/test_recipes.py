"""Compare the reports of ``doctor --model`` about published recipes with the arguments that the engine resolves."""

from __future__ import annotations

from typing import Any

import pytest
import share
from common import doctor_answers
from conftest import RELEASE
from releases import DEFAULT
from whole import recipes

FORMATS = {
    None: {"BF16"},
    "fp8": {"FP8 in blocks"},
    "mxfp4": {"MXFP4"},
    "compressed-tensors": {"INT4", "INT4 or INT8 weights"},
}
CHOSEN_BY_LAYERS = {"triton", "marlin"}
"""MoE runners that ``doctor`` may report if ``--moe-runner-backend`` is ``auto`` after the engine has resolved its
arguments. Each MoE layer then chooses its runner itself."""


def is_consistent(recipe: dict[str, Any], doctor: dict[str, Any], engine: dict[str, Any]) -> bool:
    """Return whether ``doctor``'s report agrees with the engine's resolved arguments."""
    if "refused" in engine and any("draft-model-path" in flag for flag in recipe["flags"]):
        return any(
            "draft model" in line for line in doctor["unknown"]
        )  # the draft model is missing, and doctor reports without it
    if "refused" in engine or "refused" in doctor:
        return "refused" in engine and "refused" in doctor
    server = doctor["server"]
    runners = CHOSEN_BY_LAYERS if engine["runner"] == "auto" else {engine["runner"]}
    resolved = (engine["tokens"], {name: engine[name] for name in ("tp", "ep", "dp")})
    same_sizes = (server["tokens"], server["layout"]) == resolved
    return same_sizes and server["runner"] in runners and server["format"] in FORMATS[engine["quantization"]]


@pytest.mark.ci
@pytest.mark.long("the arguments of about a hundred published servers are resolved twice")
@pytest.mark.every_release
def test_doctor_and_the_engine_agree_about_every_recipe():
    """``doctor`` reports the same runner, sizes and quantization for published recipes as the engine resolves. On the
    default release, the test checks all recipes. On other releases, it checks every fourth recipe of two GPU models,
    one of which is a Blackwell. The engine is imported once for each GPU model."""
    servers = list(recipes.servers_with_config())
    assert len(servers) > 80
    if RELEASE != DEFAULT:
        servers = [server for server in servers if server["gpu"] in ("h200", "b200")]
        servers = servers[:: len(servers) // share.case_count(len(servers))]
        assert len({server["gpu"] for server in servers}) == 2
    answers = doctor_answers.call_for_servers(servers, "engine_resolution:compare")
    assert [(recipe, reports) for recipe, reports in answers if not is_consistent(recipe, **reports)] == []
