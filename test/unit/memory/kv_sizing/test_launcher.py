"""What is hooked in the launcher: a fraction that was given, and when a server says that it is ready."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from sglang_moe_patches.core.patch import Patcher
from sglang_moe_patches.lab.servers.server import free_port
from sglang_moe_patches.memory.kv_sizing import eligibility, launcher, rehearsal
from sglang_moe_patches.registry import CHANGES

KEY = "secret"


class Resolving:
    """As the engine's ``ServerArgs`` up to 0.5.19: construction fills in the fraction."""

    def __init__(self, fraction=None, device="cuda"):
        self.mem_fraction_static, self.device = fraction, device
        self.__post_init__()

    def __post_init__(self):
        self.mem_fraction_static = self.mem_fraction_static or 0.88


def test_nothing_is_hooked_where_it_is_not_asked_for(monkeypatch):
    before = vars(Resolving)["__post_init__"]
    monkeypatch.delenv(eligibility.KV_SIZING.name, raising=False)
    launcher.hook_server_args(SimpleNamespace(ServerArgs=Resolving), Patcher())
    assert vars(Resolving)["__post_init__"] is before
    change = next(each for each in CHANGES if each.name == "kv-sizing")
    assert "turns it on" in str(change.skip_reason(Resolving()))


def test_a_fraction_that_was_given_is_told_from_the_engines_own(monkeypatch):
    monkeypatch.setenv(eligibility.KV_SIZING.name, "auto")
    early, patcher = Resolving(), Patcher()
    launcher.hook_server_args(SimpleNamespace(ServerArgs=Resolving), patcher)
    try:
        assert not launcher.given_by_the_user(Resolving())
        assert launcher.given_by_the_user(Resolving(0.88))
        assert launcher.given_by_the_user(early)  # it arrived resolved
        # Of a server that is not sized no scheduler would take the mark off.
        assert launcher.MARK not in vars(Resolving(device="cpu"))
    finally:
        patcher.undo()
    for raw in (0.9, None):
        server_args = SimpleNamespace(_raw_input={"mem_fraction_static": raw})
        assert launcher.given_by_the_user(server_args) == (raw is not None)


@pytest.mark.parametrize(("warmup_s", "limits_s"), [(-1, (300, 60)), (60, (30, 15)), (3600, (300, 60))])
def test_a_rehearsal_ends_within_the_engines_own_warm_up(warmup_s, limits_s, monkeypatch):
    envs = SimpleNamespace(SGLANG_WARMUP_TIMEOUT=SimpleNamespace(get=lambda: warmup_s))
    monkeypatch.setitem(sys.modules, "sglang.srt.environ", SimpleNamespace(envs=envs))
    assert (rehearsal.timeout_s(), rehearsal.abandon_after_s()) == limits_s


@pytest.fixture
def http_server(monkeypatch):
    """The engine's HTTP server listens a second later, by the launcher's clock, and answers when its scheduler does."""
    happened: list[object] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            happened.append(self.path)
            self.send_response(200 if self.headers["Authorization"] == f"Bearer {KEY}" else 401)
            self.end_headers()

        def log_message(self, *args):
            pass

    port = free_port()
    started: list[ThreadingHTTPServer] = []
    clock = SimpleNamespace(now=0.0)

    def sleep(seconds):
        clock.now += seconds
        if clock.now > 1 and not started:
            started.append(ThreadingHTTPServer(("127.0.0.1", port), Handler))
            threading.Thread(target=started[0].serve_forever).start()

    monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    yield SimpleNamespace(url=f"http://127.0.0.1:{port}", happened=happened)
    for each in started:
        each.shutdown()
        each.server_close()


@pytest.mark.parametrize(
    ("mode", "device", "skips", "key", "limit_s", "asks", "warns"),
    [
        ("auto", "cuda", True, KEY, None, True, ""),
        ("auto", "cuda", True, "wrong", None, True, "HTTP Error 401"),
        ("auto", "cuda", True, KEY, 0.9, False, "does not answer"),
        ("auto", "cuda", False, KEY, None, False, ""),
        ("auto", "cpu", True, KEY, None, False, ""),
        ("off", "cuda", True, KEY, None, False, ""),
    ],
)
def test_ready_is_said_when_the_scheduler_answers(
    mode, device, skips, key, limit_s, asks, warns, http_server, monkeypatch, caplog
):
    monkeypatch.setenv(eligibility.KV_SIZING.name, mode)
    monkeypatch.setattr(launcher, "warmup_limit_s", lambda: limit_s)
    ready = http_server.happened.append
    stock = SimpleNamespace(_wait_and_warmup=lambda arguments, callback: ready((arguments, callback)))
    module = SimpleNamespace(**vars(stock))
    launcher.hook_warmup(module, Patcher())
    assert (module._wait_and_warmup is stock._wait_and_warmup) == (mode == "off")
    arguments = SimpleNamespace(device=device, skip_server_warmup=skips, api_key=key, url=lambda: http_server.url)
    module._wait_and_warmup(arguments, callback="then")
    assert http_server.happened == [*["/server_info"] * asks, (arguments, "then")]
    assert warns in caplog.text
    assert bool(caplog.text) == bool(warns)
