"""The replay of an allocator's record."""

from __future__ import annotations

from types import SimpleNamespace

from common import history
from common.history import Block, History, Moment, describe, replay
from sglang_moe_patches.lab.observers.forwards import Observer


def event(action, addr, size, *lines, time_us=0):
    frames = [{"filename": f"/x/sglang/srt/{name}", "line": line, "name": "f"} for name, line in lines]
    return {"action": action, "addr": addr, "size": size, "time_us": time_us, "frames": frames}


def test_replay_follows_bytes_in_use_and_knows_what_is_alive():
    events = [
        event("alloc", 1, 1000, ("a.py", 3), time_us=5000),
        event("segment_alloc", 9, 1 << 20, time_us=6000),  # from the driver: no tensor's
        event("alloc", 2, 2048, ("b.py", 4), time_us=7000),
        event("free_requested", 1, 1000, time_us=8000),
        event("free_completed", 1, 1000, time_us=8000),
        event("alloc", 1, 512, ("c.py", 5), time_us=9000),  # the address again
        event("free_requested", 7, 4096, time_us=10000),  # from before the start
    ]
    line, moments = replay(events, [3, 6, 7])
    assert line == [(0, 1024), (2, 3072), (3, 2048), (4, 2560), (5, -1536)]
    assert [moment.bytes for moment in moments] == [3072, 2560, -1536, 3072]
    sizes = [[block.bytes for block in moment.blocks] for moment in moments]
    assert sizes == [[2048, 1024], [2048, 512], [2048, 512], [2048, 1024]]
    assert [block.code[0].split()[0] for block in moments[1].blocks] == ["b.py:4", "c.py:5"]
    assert [block.after_mark for block in moments[1].blocks] == [0, 1]
    assert replay([], [0]) == ([], [Moment(0, ())] * 2)


def test_describe_shows_the_engines_lines_innermost_first():
    stack = [
        ("/torch/x.py", 1),
        ("/p/sglang_moe_patches/changes/y.py", 1),
        ("/p/sglang/srt/plugins/hook_registry.py", 1),
        ("/p/sglang/srt/layers/linear.py", 7),
        ("/p/sglang/srt/model_executor/model_runner.py", 1),
        ("/p/sglang/srt/models/deepseek_v2.py", 8),
    ]
    frames = [{"filename": path, "line": line, "name": "f"} for path, line in stack]
    assert describe(frames) == ("linear.py:7 f: ", "deepseek_v2.py:8 f: ")


def test_the_second_forward_with_so_many_tokens_is_recorded(tmp_path, monkeypatch):
    marked, recorded = [], History(((0.0, 512),), (), Moment(7, (Block(512, ("a.py:1 f: x = y", "b.py"), 3),)))
    for name in ("forward_starts", "kernel_starts", "forward_ends"):
        monkeypatch.setattr(Observer, name, lambda self, *args: None)
    recorder = SimpleNamespace(mark=lambda: marked.append(1), finish=lambda: recorded)
    monkeypatch.setattr(history, "Recorder", lambda: recorder)
    monkeypatch.setenv(history.TOKENS, "9")
    history.register()
    observer, written = Observer(str(tmp_path), ()), []
    for tokens, largest, cuda in ((9, 0, True), (5, 9, True), (9, 9, False), (9, 9, True), (9, 9, True)):
        observer.memory.tokens = largest
        observer.forward_starts(tokens, cuda)
        observer.kernel_starts()
        observer.forward_ends()
        written.append(history.collect(tmp_path))
    assert written == [None, None, None, recorded, recorded]
    assert len(marked) == 1
