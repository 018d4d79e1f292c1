"""Tests of ``common.neighbour``, which lets another process allocate GPU memory beside a server. They check how much
memory this process leaves free, and that it frees its memory after the server has answered."""

from __future__ import annotations

from types import SimpleNamespace

from common import neighbour

METRICS = """# TYPE sglang_moe_patches:given_back_bytes gauge
sglang_moe_patches:given_back_bytes{gpu="0",rank="0"} 7e+06
sglang_moe_patches:given_back_bytes{gpu="1",rank="1"} 5e+06
"""


def test_a_neighbour_leaves_less_than_half_of_the_margin_free_until_the_questions_are_answered(tmp_path, monkeypatch):
    file, observed = tmp_path / "short", []

    def send_mixed(server, info, vocabulary, seconds):
        observed.append(1000 - int(file.read_text()))  # free bytes of the margin, which has 1,000 bytes
        return {"errors": []}

    def ask():
        observed.append(file.exists())
        return ["a"]

    client = SimpleNamespace(
        metrics=lambda: METRICS,
        info=lambda: {"internal_states": [{"memory_usage": {"token_capacity": tokens}} for tokens in (4, 5)]},
    )
    monkeypatch.setattr(neighbour.overfill, "send_mixed", send_mixed)
    monkeypatch.setattr(neighbour, "Client", lambda url: client)
    server = SimpleNamespace(url="http://here", environment={neighbour.STAND_IN_VARIABLE: str(file)})
    outcome = neighbour.take_memory(server, {}, 5000, 1000, 1.0, ask)
    assert (0 < observed[0] < 500, observed[1], file.exists()) == (True, True, False)
    assert outcome == {"errors": [], "answers": ["a"], "taken": 600, "tokens": 4, "given_back": 5_000_000}
