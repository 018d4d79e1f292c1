"""Another process takes memory while a server is asked: what is taken, and when the questions are asked once more."""

from __future__ import annotations

from types import SimpleNamespace

from common import taken

METRICS = """# TYPE sglang_moe_patches:given_back_bytes gauge
sglang_moe_patches:given_back_bytes{gpu="0",rank="0"} 7e+06
sglang_moe_patches:given_back_bytes{gpu="1",rank="1"} 5e+06
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs 3.0
"""


def test_of_all_ranks_the_least_counts():
    assert taken.gauges(METRICS) == {"given_back_bytes": 5e6}


def test_memory_is_taken_until_less_than_half_the_margin_is_free_and_questions_are_asked_meanwhile(
    tmp_path, monkeypatch
):
    short, seen = tmp_path / "short", []

    def mixed(server, info, vocabulary, seconds):
        seen.append(1000 - int(short.read_text()))  # of a margin that was free
        return {"errors": []}

    def ask():
        seen.append(short.exists())
        return ["a"]

    client = SimpleNamespace(
        metrics=lambda: METRICS,
        info=lambda: {"internal_states": [{"memory_usage": {"token_capacity": each}} for each in (4, 5)]},
    )
    monkeypatch.setattr(taken.overfill, "mixed", mixed)
    monkeypatch.setattr(taken, "Client", lambda url: client)
    server = SimpleNamespace(url="http://here", environment={taken.STAND_IN: str(short)})
    outcome = taken.taken(server, {}, 5000, 1000, 1.0, ask)
    assert (0 < seen[0] < 500, seen[1], short.exists()) == (True, True, False)
    assert outcome == {"errors": [], "answers": ["a"], "taken": 600, "tokens": 4, "given_back": 5_000_000}
