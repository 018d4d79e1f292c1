"""The file of records: read whatever it has, written whole or not at all; and what becomes of a record."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_servers import ELSEWHERE, GB, KEY, MEASURED, START, A, B
from sglang_moe_patches.memory.kv_sizing import record, sizing
from sglang_moe_patches.memory.kv_sizing.record import NeedParts, Record


@pytest.fixture
def path(tmp_path):
    """A file with one record."""
    record.update(tmp_path / "kv.json", KEY, lambda old: MEASURED)
    return tmp_path / "kv.json"


# --- The file --------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_and_one_record_can_be_forgotten(tmp_path):
    path = tmp_path / "new" / "kv.json"
    assert record.read(path) == {}
    inputs = {"model": "m", "arguments": {"tp_size": 2}}
    known = replace(MEASURED, fingerprint_inputs=inputs, lowest_free_serving=5, proven=True, parts=NeedParts(slack=GB))
    record.update(path, KEY, lambda old: known)
    record.update(path, "b", lambda old: record.with_rehearsal_begun(old, 0, "launch"))
    begun = Record(unfinished=("0 of launch",))
    assert record.read(path) == {KEY: known, "b": begun}
    record.update(path, KEY, lambda old: None)
    assert record.read(path) == {"b": begun}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param("", "is not whole JSON", id="empty"),
        pytest.param("\0", "is not whole JSON", id="no text"),
        pytest.param('{"format": 3, "records": {"a": {"need": 12', "is not whole JSON", id="half"),
        pytest.param("[]", "is no file of records", id="a list"),
        pytest.param('{"format": 1, "records": {}}', "has format 1, this version reads 3", id="another format"),
        *[
            pytest.param(f'{{"format": 3, "records": {{"a": {found}}}}}', why, id=why)
            for found, why in [
                ("5", "has a Record that is none"),
                ('{"need": "many"}', "whose need is 'many'"),
                ('{"need": true}', "whose need is True"),
                ('{"need": -1}', "whose need is -1"),
                ('{"fraction": NaN}', "whose fraction is nan"),
                ('{"fraction": Infinity}', "whose fraction is inf"),
                ('{"parts": {"slack": "x"}}', "whose slack is 'x'"),
                ('{"ranks": [1, null]}', "whose ranks is None"),
            ]
        ],
    ],
)
def test_a_broken_file_is_a_reason_and_is_put_aside_when_the_next_record_is_written(tmp_path, text, why):
    path = tmp_path / "kv.json"
    path.write_text(text)
    with pytest.raises(record.Unreadable, match=why):
        record.read(path)
    record.update(path, KEY, lambda old: MEASURED)
    assert record.read(path) == {KEY: MEASURED}
    assert (tmp_path / "kv.json.unreadable").read_text() == text


@given(st.text(max_size=60) | st.binary(max_size=60))
def test_whatever_a_file_has_it_is_read_or_a_reason(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    with suppress(record.Unreadable):
        assert record.read(path) == {}


def test_fields_that_a_newer_version_has_are_left_out(tmp_path):
    path = tmp_path / "kv.json"
    path.write_text('{"format": 3, "records": {"a": {"need": 5, "of_the_future": 1}}}')
    assert record.read(path) == {"a": Record(need=5)}


def test_what_does_not_change_is_not_written(path, monkeypatch):
    with monkeypatch.context() as unchanged:
        unchanged.setattr(record, "_write", lambda *given: pytest.fail("it is written"))
        assert record.update(path, "another", lambda old: None) is None
        assert record.update(path, KEY, replace) == MEASURED
    record.update(path, KEY, record.with_out_of_memory)
    assert record.read(path)[KEY].ooms == 1


def test_what_fails_while_it_is_written_leaves_the_old_file(path, monkeypatch):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record.os, "fsync", fail)
    with pytest.raises(record.Unwritable, match="No space left on device"):
        record.update(path, KEY, lambda old: None)
    assert record.read(path) == {KEY: MEASURED}
    assert sorted(each.name for each in path.parent.iterdir()) == ["kv.json", "kv.json.lock"]


KILLED = """
import os, signal, sys
from pathlib import Path
from sglang_moe_patches.memory.kv_sizing import record

setattr(record.os, sys.argv[2], lambda *given: os.kill(os.getpid(), signal.SIGKILL))
record.update(Path(sys.argv[1]), sys.argv[3], lambda old: None)
"""


@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_who_is_killed_while_it_writes_leaves_the_old_file_and_nobody_waiting(path, at):
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), at, KEY], check=False)
    assert done.returncode == -signal.SIGKILL
    assert record.read(path) == {KEY: MEASURED}
    record.update(path, KEY, record.with_out_of_memory)
    assert record.read(path) == {KEY: replace(MEASURED, ooms=1)}
    assert sorted(each.name for each in path.parent.iterdir()) == ["kv.json", "kv.json.lock"]


def test_who_writes_while_another_does_waits_for_it_and_loses_nothing(path):
    other = threading.Thread(target=record.update, args=(path, KEY, record.with_out_of_memory))

    def slowly(old):
        # While serving nothing is waited for.
        with pytest.raises(record.Busy, match="by another process"):
            record.update(path, KEY, record.with_out_of_memory, wait_s=0)
        other.start()
        other.join(0.5)  # as long as it may take to come in between
        return record.with_out_of_memory(old)

    record.update(path, KEY, slowly)
    other.join()
    assert record.read(path)[KEY].ooms == 2


# --- What becomes of a record ----------------------------------------------------------------------------------------


STOPPED = {"need": 12 * GB, "reached": (), "missed": ("mixed chunk",), "fraction": 0.9}
SECOND = {"need": 9 * GB, "fraction": 0.9, "rule_tokens": 0, "proven": True}


@pytest.mark.parametrize(
    ("old", "new", "stopped", "expected"),
    [
        pytest.param(Record(), {}, False, {"need": 8 * GB, "proven": False, "rehearsals": 1}, id="the first"),
        pytest.param(MEASURED, SECOND, False, {**SECOND, "rule_tokens": 382_206}, id="a second proves it"),
        pytest.param(MEASURED, {"need": GB}, False, {"need": 8 * GB}, id="an earlier need counts where it was larger"),
        # The next server is smaller, but nothing is proven.
        pytest.param(
            replace(MEASURED, proven=True),
            STOPPED,
            True,
            {"need": 12 * GB, "proven": False, "missed": (), "reached": MEASURED.reached, "fraction": 0.8},
            id="a second that stops early",
        ),
    ],
)
def test_a_rehearsal_makes_a_record_or_proves_it_or_makes_its_need_larger(old, new, stopped, expected):
    became = record.with_rehearsal(old, replace(MEASURED, **new), 0, A, stopped=stopped)
    assert {name: getattr(became, name) for name in expected} == expected


@pytest.mark.parametrize("stopped", [False, True])
def test_the_replicas_of_a_launch_have_rehearsed_once(stopped):
    missed = replace(MEASURED, missed=("mixed chunk",))
    for rehearsals, gpu, launch in ((1, 0, A), (1, 1, A), (2, 0, B), (2, 1, B)):
        missed = record.with_rehearsal(missed, missed, gpu, launch, stopped=stopped)
        assert missed.rehearsals == rehearsals


def test_a_replica_is_no_proof_where_another_needs_more_than_it_set_aside():
    second = replace(MEASURED, reserve=14 * GB, proven=True)
    for more, proven in ((14 * GB - 1, True), (15 * GB, False)):
        meanwhile = record.with_rehearsal(MEASURED, replace(MEASURED, need=more), 1, A, stopped=True)
        became = record.with_rehearsal(meanwhile, second, 0, A)
        assert (became.need, became.proven) == (more, proven)


def test_rehearsals_that_do_not_end_are_counted_by_launch_and_forgiven_by_gpu_and_machine():
    both = record.with_rehearsal_begun(record.with_rehearsal_begun(Record(), 0, A), 1, A)
    assert both.attempts == 1
    one = record.with_rehearsal(both, MEASURED, 0, A)
    assert one.attempts == 1
    # The second replica ends its server again and again, long after the first is done.
    again = record.with_rehearsal_begun(record.with_rehearsal_begun(one, 0, B), 1, B)
    again = record.with_rehearsal(again, MEASURED, 0, B)
    assert again.attempts == 2
    assert record.with_rehearsal(again, MEASURED, 1, B).attempts == 0
    elsewhere = record.with_rehearsal_begun(Record(), 0, ELSEWHERE)
    assert record.with_rehearsal(elsewhere, MEASURED, 0, A).attempts == 1


def test_a_sized_start_that_dies_before_it_serves_makes_the_next_smaller_and_then_the_rule_applies():
    """Graph capture, a warm-up, an orchestrator's kill: the start after it must not take the same fraction."""
    fractions, known = [], MEASURED
    for launch in (A, B, ELSEWHERE):
        fractions.append(sizing.decide(START, known).fraction)
        known = record.with_unserved(known, launch)
    assert fractions[0] > fractions[1] > START.fraction
    assert fractions[2] is None
    assert sizing.decide(START, record.with_served_start(known)).fraction == fractions[0]
    assert record.with_rehearsal(known, MEASURED, 0, A).unserved == known.unserved
    assert record.with_unserved(Record(), A) is None  # forgotten meanwhile


@pytest.mark.parametrize("stopped", [False, True])
def test_the_larger_need_counts_with_its_parts(stopped):
    small, large = (replace(MEASURED, need=need, parts=NeedParts(slack=need)) for need in (GB, 9 * GB))
    for old, new in ((small, large), (large, small)):
        became = record.with_rehearsal(old, new, 0, A, stopped=stopped)
        assert (became.need, became.parts) == (9 * GB, large.parts)


def test_what_is_seen_while_serving_counts_from_then_on():
    seen = record.with_serving(record.with_serving(MEASURED, 12 * GB, 5 * GB), 12 * GB, 2 * GB)
    assert (seen.serving_peak_need, seen.lowest_free_serving) == (10 * GB, 2 * GB)
    assert record.with_serving(seen, 12 * GB, 6 * GB) == seen
    again = record.with_rehearsal(record.with_out_of_memory(seen), MEASURED, 0, A)
    assert (again.serving_peak_need, again.lowest_free_serving, again.ooms) == (10 * GB, 2 * GB, 1)


@pytest.mark.parametrize(
    ("seconds", "words"), [(5, "less than a minute"), (60, "1 minute"), (7200, "2 hours"), (260_000, "3 days")]
)
def test_an_age_in_words(seconds, words):
    assert record.age(Record(measured=1000.0), 1000.0 + seconds) == words
