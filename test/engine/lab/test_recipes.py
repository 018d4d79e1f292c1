"""What ``doctor --model`` says of published recipes, against what the engine resolves of the same flags."""

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
"""Runners that the engine's arguments leave at ``auto``."""


def agree(recipe: dict[str, Any], doctor: dict[str, Any], engine: dict[str, Any]) -> bool:
    if "refused" in engine and any("draft-model-path" in flag for flag in recipe["flags"]):
        return any("draft model" in line for line in doctor["unknown"])  # it is not at hand, and doctor does without
    if "refused" in engine or "refused" in doctor:
        return "refused" in engine and "refused" in doctor
    server = doctor["server"]
    runners = CHOSEN_BY_LAYERS if engine["runner"] == "auto" else {engine["runner"]}
    resolved = (engine["tokens"], {name: engine[name] for name in ("tp", "ep", "dp")})
    same_sizes = (server["tokens"], server["layout"]) == resolved
    return same_sizes and server["runner"] in runners and server["format"] in FORMATS[engine["quantization"]]


@pytest.mark.ci
@pytest.mark.long("about a hundred published servers, of which each is resolved twice")
@pytest.mark.every_release
def test_doctor_says_of_every_recipe_what_the_engine_resolves():
    """On the other releases of every fourth of those on one kind of GPU before Blackwell and one of Blackwell: for each
    kind the engine is imported."""
    servers = list(recipes.servers_with_config())
    assert len(servers) > 80
    if RELEASE != DEFAULT:
        servers = [server for server in servers if server["gpu"] in ("h200", "b200")]
        servers = servers[:: len(servers) // share.cases(len(servers))]
        assert len({server["gpu"] for server in servers}) == 2
    answers = doctor_answers.ask_each(servers, "engine_resolution:compare")
    assert [(recipe, found) for recipe, found in answers if not agree(recipe, **found)] == []
