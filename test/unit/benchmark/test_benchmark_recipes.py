"""What the README says of published recipes."""

from __future__ import annotations

from typing import Any

from whole import recipes

ANSWER = {"acts": ["moe-workspace"], "peaks": [100, 50], "kv_sizing": recipes.SIZED, "starts": True}
REFUSED = {"refused": "no such flag"}


def row(gpu: str, *answers: dict[str, Any]) -> list[dict[str, Any]]:
    """A recipe as each release answers it."""
    return [{"recipe": {"gpu": gpu}, "found": answer} for answer in answers]


def test_of_recipes_on_hopper_it_is_counted_what_saves_nothing_and_what_they_gain_instead():
    rows = [
        row("H200", REFUSED, ANSWER),
        row("H100", ANSWER | {"acts": ["activation-segments"], "peaks": [100, 100]}, REFUSED),
        row("H20", ANSWER | {"acts": [], "peaks": None, "kv_sizing": recipes.LEFT_ALONE}, ANSWER),
        row("H200", ANSWER | {"acts": ["fp4-weights"], "peaks": [100, 96], "starts": False}, ANSWER),
        row("H200", REFUSED, REFUSED),
        row("B200", ANSWER, ANSWER),
    ]
    results = [{"figures": {"recipes": list(answers)}} for answers in zip(*rows, strict=True)]
    said = recipes.on_hopper(results)
    assert "Of 4 [published recipes](docs/commands/models.md), 3 run no code" in said
    assert "The peak of 3 can be predicted, and 2 of these save at most 5 %" in said
    assert "grows the KV cache of 2, `always` that of 1 more" in said
    assert "the weights of 1 smaller" in said
