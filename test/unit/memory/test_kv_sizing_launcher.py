"""A server that skips its warm-up says that it is ready when its scheduler reads requests."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from sglang_moe_patches.core.patch import Patcher
from sglang_moe_patches.lab.servers.server import free_port
from sglang_moe_patches.memory.kv_sizing import eligibility, launcher

REHEARSES_S = 0.4
KEY = "secret"


@pytest.fixture
def scheduler():
    """An HTTP server of the engine's that answers when its scheduler does: started late, as the engine's is."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            time.sleep(REHEARSES_S)
            self.send_response(200 if self.headers["Authorization"] == f"Bearer {KEY}" else 401)
            self.end_headers()

        def log_message(self, *args):
            pass

    port = free_port()
    started: list[ThreadingHTTPServer] = []

    def listen():
        started.append(ThreadingHTTPServer(("127.0.0.1", port), Handler))
        started[0].serve_forever()

    later = threading.Timer(0.2, listen)
    later.start()
    yield SimpleNamespace(url=f"http://127.0.0.1:{port}", asked=asked)
    later.cancel()
    for each in started:
        each.shutdown()
        each.server_close()


@pytest.mark.parametrize(
    ("mode", "skips", "key", "limit_s", "waits", "warns"),
    [
        ("auto", True, KEY, None, True, ""),
        ("auto", True, "wrong", None, True, "HTTP Error 401"),
        ("auto", True, KEY, 0.1, False, "does not answer"),
        ("auto", False, KEY, None, False, ""),
        ("off", True, KEY, None, False, ""),
    ],
)
def test_ready_is_said_when_the_scheduler_answers(
    mode, skips, key, limit_s, waits, warns, scheduler, monkeypatch, caplog
):
    monkeypatch.setenv(eligibility.KV_SIZING.name, mode)
    monkeypatch.setattr(launcher, "RETRY_S", 0.05)
    monkeypatch.setattr(launcher, "warmup_limit_s", lambda: limit_s)
    ready: list[tuple[object, str]] = []
    module = SimpleNamespace(_wait_and_warmup=lambda arguments, callback: ready.append((arguments, callback)))
    launcher.hook_warmup(module, Patcher())
    arguments = SimpleNamespace(device="cuda", skip_server_warmup=skips, api_key=key, url=lambda: scheduler.url)
    began = time.monotonic()
    module._wait_and_warmup(arguments, callback="then")
    assert ready == [(arguments, "then")]
    assert (time.monotonic() - began > REHEARSES_S) == waits
    assert scheduler.asked == ["/server_info"] * waits
    assert warns in caplog.text
    assert bool(caplog.text) == bool(warns)
