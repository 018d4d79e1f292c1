"""What ``doctor`` tells of records."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from kv_servers import GB, KEY, MEASURED, SIZED, START
from sglang_moe_patches import __version__, cli
from sglang_moe_patches.lab import kv_records
from sglang_moe_patches.memory.kv_sizing import eligibility, record
from sglang_moe_patches.memory.kv_sizing.record import NeedParts, Record
from typer.testing import CliRunner

PARTS = {
    "500 MB request table",
    "500 MB the draft model's KV cache",
    "1,000 MB decode graphs",
    "2,000 MB prefill graphs",
    "3,000 MB tensors of the largest forward (mixed chunk)",
    "500 MB slack of PyTorch's allocator",
    f"500 MB {kv_records.REST}",
}
APART = {
    "table_bytes": GB // 2,
    "draft_kv_bytes": GB // 2,
    "parts": NeedParts(GB, 2 * GB, 3 * GB, "mixed chunk", slack=GB // 2),
}
CHANGES = {"moe-workspace": "applied"}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, {"8,000 MB needed", "8,000, 7,000 by rank", "382,206 tokens", "reached: prefill chunk"}),
        ({}, {"rehearses once more", f"suggested: --mem-fraction-static {SIZED}, with which 726,191 tokens fit"}),
        (
            {"fingerprint_inputs": {"arguments": {"max_total_tokens": 100_000}}},
            {"the next start: --max-total-tokens 100,000 is used; 726,191 would fit"},
        ),
        ({"fingerprint_inputs": {"package": __version__}}, {"the next start: sized by it"}),
        (
            {"fingerprint_inputs": {"package": "0.1"}},
            {f"measures anew, as this record is of another version 0.1, now {__version__}"},
        ),
        (
            {"fingerprint_inputs": {"margin": 7}},
            {f"measures anew, as this record is of another margin in bytes 7, now {START.margin}"},
        ),
        (APART, PARTS),
        ({}, {f"8,000 MB {kv_records.REST}"}),
        ({"parts": NeedParts(not_run=GB)}, {"1,000 MB kept for the forward before"}),
        ({"parts": NeedParts(decode_graphs=5 * GB, tensors=4 * GB)}, {"8,000 MB parts that overlap"}),
        ({"lowest_free_serving": 3 * GB, "ooms": 1}, {"3,000 MB free", "while serving: 1"}),
        ({"missed": ("x",), "skipped": ("y: z",)}, {"not reached, so", "skipped: y: z"}),
        (vars(Record(unfinished=("0 of a",))), {"1 rehearsals have begun and not ended"}),
        (
            {"fingerprint_inputs": {"model": "m", "device": "H200", "devices": 2, "changes": CHANGES}},
            {KEY, "m on 2 x H200", "moe-workspace: applied"},
        ),
    ],
)
def test_a_record_is_told_to_people(changed, told):
    known = replace(MEASURED, **changed)
    text = "\n".join(kv_records.describe(KEY, known))
    assert {part for part in told if part not in text} == set()
    assert sum(kv_records.advice(known)["need_made_of"].values()) == known.need


def test_what_the_rule_keeps_for_images_is_in_the_suggestion():
    plain, images = (kv_records.advice(replace(MEASURED, images=size))["suggested_fraction"] for size in (0, 14 * GB))
    assert plain - images == pytest.approx(0.1)


def test_doctor_lists_and_forgets(tmp_path, monkeypatch):
    def said(*arguments):
        found = CliRunner().invoke(cli.app, ["doctor", *arguments])
        return found.exit_code, found.output

    path = tmp_path / "kv.json"
    monkeypatch.setenv(eligibility.KV_RECORD.name, str(path))
    assert said("--kv") == (0, f"{path}: 0 records\n")
    for name in ("abc", "abd", "xyz"):
        record.update(path, name, lambda old: MEASURED)
    assert said("--kv")[1].startswith(f"{path}: 3 records\n")
    told = json.loads(said("--kv", "--json")[1])["records"]["xyz"]
    assert (told["need"], told["suggested_fraction"], told["suggested_tokens"]) == (8 * GB, SIZED, 726_191)
    assert said("--forget", "ab") == (0, f"{path}: abc, abd forgotten\n")
    with pytest.raises(ValueError, match="has no record q; it has xyz"):
        kv_records.forget("q")
    assert said("--forget", "all") == (0, f"{path}: xyz forgotten\n")
    assert said("--kv") == (0, f"{path}: 0 records\n")
    path.write_text("{")
    with pytest.raises(ValueError, match="is not whole JSON"):
        kv_records.format_records()
    assert said("--forget", "x")[0] == 2
