"""The replay of an allocator's record."""

from __future__ import annotations

from types import SimpleNamespace

from common import history
from sglang_moe_patches.lab.observers.forwards import Observer


def test_replay_follows_bytes_in_use():
    events = [
        ("alloc", 1, 1000),
        ("segment_alloc", 9, 1 << 20),  # from the driver: no tensor's
        ("alloc", 2, 2048),
        ("free_requested", 1, 1000),
        ("free_completed", 1, 1000),
        ("alloc", 1, 512),  # the address again
        ("free_requested", 7, 4096),  # from before the start
    ]
    line = history.replay(dict(zip(("action", "addr", "size"), event, strict=True)) for event in events)
    assert line == [1024, 3072, 2048, 2560, -1536]
    assert history.replay([]) == []


def test_the_second_forward_with_so_many_tokens_is_recorded(tmp_path, monkeypatch):
    recorded = [512, 7]
    for name in ("forward_starts", "forward_ends"):
        monkeypatch.setattr(Observer, name, lambda self, *args: None)
    monkeypatch.setattr(history, "Recorder", lambda: SimpleNamespace(finish=lambda: recorded))
    monkeypatch.setenv(history.TOKENS, "9")
    history.register()
    observer, written = Observer(str(tmp_path), ()), []
    for tokens, largest, cuda in ((9, 0, True), (5, 9, True), (9, 9, False), (9, 9, True), (9, 9, True)):
        observer.memory.tokens = largest
        observer.forward_starts(tokens, cuda)
        observer.forward_ends()
        written.append(history.collect(tmp_path))
    assert written == [None, None, None, recorded, recorded]
