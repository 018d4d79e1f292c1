"""Tests of the README's paragraph on published recipes, which ``benchmark/whole/recipes.py`` writes."""

from __future__ import annotations

from typing import Any

from whole import recipes

ANSWER = {"acts": ["moe-workspace"], "peaks": [100, 50], "kv_sizing": recipes.SIZED, "starts": True}
REFUSED = {"refused": "no such flag"}


def row(gpu: str, *answers: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one recipe's entry in the result of each engine release.

    :param gpu: GPU model of the recipe.
    :param answers: ``doctor``'s answer on each release.
    """
    return [{"recipe": {"gpu": gpu}, "found": answer} for answer in answers]


def test_the_paragraph_on_hopper_counts_the_recipes_that_save_memory_or_grow():
    rows = [
        row("H200", REFUSED, ANSWER),
        row("H100", ANSWER | {"acts": ["activation-segments"], "peaks": [100, 100]}, REFUSED),
        row("H20", ANSWER | {"acts": [], "peaks": None, "kv_sizing": recipes.LEFT_ALONE}, ANSWER),
        row("H200", ANSWER | {"acts": ["fp4-weights"], "peaks": [100, 96], "starts": False}, ANSWER),
        row("H200", REFUSED, REFUSED),
        row("B200", ANSWER, ANSWER),
    ]
    results = [{"figures": {"recipes": list(answers)}} for answers in zip(*rows, strict=True)]
    text = recipes.on_hopper(results)
    assert "examined 4 [published recipes](docs/commands/models.md). In 3 of them no change acts inside" in text
    assert "`doctor` can predict the peak memory of a forward pass for 3 of the 4." in text
    assert "For 2 of these 3 the patched server saves at most 5 % of it." in text
    assert (
        "with `SGLANG_MOE_PATCHES_KV_SIZING=auto` in 2 of these 4 recipes. 1 more set `--mem-fraction-static`" in text
    )
    assert "In 1 recipes *fp4-weights* makes the weights smaller." in text
