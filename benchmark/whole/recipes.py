"""Find the runner, the changes that act and kv-sizing's decision for each published recipe, with its own flags.

    python benchmark whole/recipes --json benchmark/results/recipes/0.5.23.json

No server starts. ``sglang-moe-patches doctor --model`` is asked about each recipe, with every change selected and
``SGLANG_MOE_PATCHES_KV_SIZING=auto``. recipes.json has the recipes and their sources. doctor's models.json
has the sizes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import doctor_answers, output
from common.shapes import MODELS, Layout
from sglang_moe_patches.core import engine
from sglang_moe_patches.lab.predict import config, model_report, room, terminal
from sglang_moe_patches.lab.predict.forward import BLOCKS
from sglang_moe_patches.memory.kv_sizing import eligibility

from whole import models

PUBLISHED = Path(__file__).with_name("recipes.json")
PAGES = "../benchmarks"
NO_CONFIG = "config.json not at hand"
SIZED, LEFT_ALONE, REASON = "sized", "given fraction left alone", "a reason"
DOES_NOT_START = "does not start: its weights leave no memory"
HOPPER = ("H100", "H200", "H20")
IN_LAYERS = {"output-buffer", "deferred-shared-experts", "moe-workspace", "cutedsl-sizing", "mori-input-truncation"}
SMALL_SAVING = 0.05
"""Fraction of the stock peak memory. A recipe that saves at most this fraction counts as saving little."""
Key = tuple[models.Sizes, int]


def read_recipes() -> dict[str, Any]:
    """Read recipes.json: ``sources`` by their short names, and ``recipes`` as they were published."""
    found: dict[str, Any] = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    return found


def servers_with_config() -> list[dict[str, Any]]:
    """Return the servers of the recipes, in the form that :func:`.doctor_answers.call_for_servers` takes. A recipe is
    left out if ``doctor`` has no copy of its model's ``config.json``.
    """
    configs = {model["source"]: model["config"] for model in config.served_models()}
    return [
        recipe | {"gpu": recipe["gpu"].lower(), "config": configs[recipe["model"]]}
        for recipe in read_recipes()["recipes"]
        if recipe["model"] in configs
    ]


def summarize(report: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a report of ``doctor --model`` that the page shows."""
    if "refused" in report:
        return report
    sizing = next(change for change in report["changes"] if change["name"] == "kv-sizing")
    is_left_alone = sizing["reason"].endswith(eligibility.kept_fraction_reason("auto"))
    return {
        "server": report["server"],
        # The source is left out, because it is a temporary folder.
        "sizes": {name: size for name, size in report["sizes"].items() if name != "source"},
        "peaks": [report["stock"]["peak"], report["patched"]["peak"]] if report["stock"] else None,
        "at_least": models.is_lower_bound(report),
        "acts": [change["name"] for change in report["changes"] if change["acts"] and change is not sizing],
        "kv_sizing": SIZED if sizing["acts"] else LEFT_ALONE if is_left_alone else REASON,
        "not_known": [change["name"] for change in report["changes"] if change["acts"] is None],
        "reason": sizing["reason"],
        "fit": report["room"] and terminal.describe_verdict(report),
        "starts": not report["room"] or report["room"]["patched"]["verdict"] != room.DOES_NOT_START,
        "unknown": [line for line in report["unknown"] if line not in model_report.ALWAYS_UNKNOWN],
    }


# --- The page --------------------------------------------------------------------------------------------------------


def outcome(answer: dict[str, Any]) -> str:
    """Return what kv-sizing does on a recipe's server, as one of these constants:

    - ``SIZED``: kv-sizing chooses the KV cache size.
    - ``LEFT_ALONE``: the recipe has ``--mem-fraction-static``, so kv-sizing with ``auto`` does nothing.
    - ``DOES_NOT_START``: the server does not start, because its weights leave no memory.
    - ``NO_CONFIG``: ``doctor`` has no copy of the model's ``config.json``.
    - ``REASON``: anything else. :func:`reason` returns the text.
    """
    if answer.get("refused") == NO_CONFIG:
        return NO_CONFIG
    return answer.get("kv_sizing", REASON) if answer.get("starts", True) else DOES_NOT_START


def reason(answer: dict[str, Any]) -> str:
    return answer.get("refused") or answer["reason"]


def counts(results: list[output.Result]) -> str:
    """Make a table of the number of recipes by outcome, with a column for each release. Recipes with the outcome
    ``REASON`` are counted by their reasons.
    """
    rows: dict[str, list[int]] = {what: [0] * len(results) for what in (SIZED, LEFT_ALONE, DOES_NOT_START)}
    for at, result in enumerate(results):
        for each in result["figures"]["recipes"]:
            found = outcome(each["found"])
            what = found if found in rows else f"neither: {reason(each['found'])}"
            rows.setdefault(what, [0] * len(results))[at] += 1
    header = ("kv-sizing", *(result["conditions"]["engine"] for result in results))
    return output.table(header, [(what, *map(str, numbers)) for what, numbers in rows.items()])


def first_answer(answers: tuple[dict[str, Any], ...]) -> tuple[int, dict[str, Any]]:
    """Return the answer of the first release that does not refuse the recipe. If all releases refuse the recipe, return
    the refusal of the first release.

    :param answers: entries about one recipe, one for each release. The key ``found`` of an entry has the answer.
    :returns: index of the release in ``answers``, and the answer.
    """
    found = ((at, each["found"]) for at, each in enumerate(answers) if "refused" not in each["found"])
    return next(found, (0, answers[0]["found"]))


def on_hopper(results: list[output.Result]) -> str:
    """Make README's paragraph on Hopper: how many recipes save memory in a forward pass, or get a larger KV cache."""
    found = []
    for answers in zip(*(result["figures"]["recipes"] for result in results), strict=True):
        _, answer = first_answer(answers)
        if answers[0]["recipe"]["gpu"] in HOPPER and "refused" not in answer:
            found.append(answer)
    idle = sum(not IN_LAYERS & {*answer["acts"]} for answer in found)
    predicted = [answer["peaks"] for answer in found if answer["peaks"]]
    little = sum(patched >= stock * (1 - SMALL_SAVING) for stock, patched in predicted)
    outcomes = [outcome(answer) for answer in found]
    packed = sum("fp4-weights" in answer["acts"] for answer in found)
    sized, left_alone = outcomes.count(SIZED), outcomes.count(LEFT_ALONE)
    return (
        f"- **On Hopper, gains inside MoE layers are mostly small.** `doctor` examined {len(found)} [published recipes]"
        f"(docs/commands/models.md). In {idle} of them no change acts inside MoE layers. `doctor` can predict the peak "
        f"memory of a forward pass for {len(predicted)} of the {len(found)}. For {little} of these {len(predicted)} "
        f"the patched server saves at most {100 * SMALL_SAVING:.0f} % of it. In {packed} recipes *fp4-weights* makes "
        "the weights smaller.\n"
        "- **The KV cache** can grow with `SGLANG_MOE_PATCHES_KV_SIZING=auto` in "
        f"{sized} of these {len(found)} recipes. {left_alone} more set `--mem-fraction-static`, so they need `always`."
    )


def make_tables(results: list[output.Result]) -> str:
    """Make a table with a row for each recipe. The row shows the report of :func:`first_answer`."""
    wholes, alone = link_measurements()
    rows, absent = [], set()
    for answers in zip(*(result["figures"]["recipes"] for result in results), strict=True):
        recipe = answers[0]["recipe"]
        if outcome(answers[0]["found"]) == NO_CONFIG:
            absent.add(recipe["model"])
            continue
        at, answer = first_answer(answers)
        name = recipe["name"] + (f" ({results[at]['conditions']['engine']})" if at else "")
        label = f"{recipe['model'].split('/')[1]}, {models.ranks(recipe['flags'])} x {recipe['gpu']}, {name}"
        if "refused" in answer:
            rows.append((label, "", "", "", "", answer["refused"]))
            continue
        server = answer["server"]
        key = (models.sizes_of_a_rank(answer), server["tokens"])
        peaks = models.in_mb(*answer["peaks"]) + " +" * answer["at_least"] if answer["peaks"] else "-"
        found = outcome(answer)
        says = reason(answer) if found == REASON else found
        run = wholes.get(key) or alone.get(key) or ""
        acts = ", ".join(answer["acts"]) or "-"
        runner = f"{server['runner'] or 'not known'}, {server['format']}; {server['tokens']:,}"
        rows.append((label, runner, peaks, acts, run, says))
    header = ("model, GPUs, recipe", "runner; chunk", "peak, MB: stock -> patched", "acts", "measured", "kv-sizing")
    named = "; ".join(f"[{each['title']}]({each['url']})" for each in read_recipes()["sources"].values())
    lacking = f" Its {NO_CONFIG}: {', '.join(sorted(absent))}." if absent else ""
    return f"Published: {named}.{lacking}\n\n{output.table(header, rows, left=len(header))}"


def link_measurements() -> tuple[dict[Key, str], dict[Key, str]]:
    """Make links to the pages with measurements.

    :returns: links to measurements of whole forward passes, and links to measurements of the MoE runner alone. In both
        dictionaries, a key has the sizes of one rank's MoE layer and the tokens of a prefill chunk.
    """
    wholes: dict[Key, str] = {}
    for forward in models.forwards():
        wholes[models.key_of(forward), forward["tokens"]] = f"[forward]({PAGES}/peak-memory.md)"
    # This measurement is the result triton-server/deepseek-v3-fp8-shard8-32768.
    sizes = models.key(MODELS["deepseek-v3-fused"], Layout(tp=8), "triton", BLOCKS)
    wholes[sizes, 32768] = f"[server]({PAGES}/triton-server.md)"
    alone = {
        (models.key_of_cell(cell), cell["tokens"]): f"[runner alone]({PAGES}/moe-workspace.md)"
        for cell in models.cells()
    }
    return wholes, alone


def answer_recipes() -> Iterator[dict[str, Any]]:
    """Yield each recipe as it was published, with the summary of doctor's report on the recipe."""
    answers = {}
    for server, found in doctor_answers.call_for_servers(servers_with_config()):
        answers[_name(server)] = summarize(found)
        print(f"{len(answers)}: {' '.join(map(str, _name(server)))}", flush=True)
    for recipe in read_recipes()["recipes"]:
        yield {"recipe": recipe, "found": answers.get(_name(recipe), {"refused": NO_CONFIG})}


def _name(recipe: dict[str, Any]) -> tuple[str, ...]:
    return recipe["source"], recipe["model"], recipe["gpu"].lower(), recipe["name"]


def main() -> None:
    options = output.parse(output.parser(__doc__))
    conditions = {"machine": "no GPU", "engine": engine.version()}
    result = output.result("recipes", {"recipes": list(answer_recipes())}, conditions)
    output.finish(options, result, lambda result: f"{counts([result])}\n{make_tables([result])}")
