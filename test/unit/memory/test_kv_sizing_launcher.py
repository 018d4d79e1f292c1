"""A server that skips its warm-up says that it is ready when its scheduler reads requests."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from sglang_moe_patches.core.patch import Patcher
from sglang_moe_patches.memory.kv_sizing import eligibility, launcher

KEY = "secret"


@pytest.fixture
def scheduler(monkeypatch):
    """An HTTP server of the engine's, which answers when its scheduler does, with the clock of who waits for it.

    Who connects first is refused; from then on it listens, if it ever does.
    """
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200 if self.headers["Authorization"] == f"Bearer {KEY}" else 401)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.server_bind()
    found = SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}", asked=asked, listens=True, waited_s=0.0)

    def sleep(seconds):
        if found.listens and not found.waited_s:
            server.server_activate()
            threading.Thread(target=server.serve_forever, daemon=True).start()
        found.waited_s += seconds

    monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=lambda: found.waited_s, sleep=sleep))
    yield found
    if found.listens and found.waited_s:
        server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("mode", "skips", "key", "listens", "attempts", "warns"),
    [
        pytest.param("auto", True, KEY, True, 2, "", id="it waits for the answer"),
        pytest.param("auto", True, "wrong", True, 2, "HTTP Error 401", id="an error is an answer"),
        pytest.param("auto", True, KEY, False, 3, "does not answer", id="it does not wait for ever"),
        pytest.param("auto", False, KEY, True, 0, "", id="the engine's own warm-up waits"),
        pytest.param("off", True, KEY, True, 0, "", id="nothing rehearses"),
    ],
)
def test_ready_is_said_when_the_scheduler_answers(
    mode, skips, key, listens, attempts, warns, scheduler, monkeypatch, caplog
):
    scheduler.listens = listens
    monkeypatch.setenv(eligibility.KV_SIZING.name, mode)
    monkeypatch.setattr(launcher, "warmup_limit_s", lambda: 2.5 * launcher.RETRY_S)
    asked_before: list[list[str]] = []
    module = SimpleNamespace(_wait_and_warmup=lambda arguments, callback: asked_before.append([*scheduler.asked]))
    launcher.hook_warmup(module, Patcher())
    arguments = SimpleNamespace(device="cuda", skip_server_warmup=skips, api_key=key, url=lambda: scheduler.url)
    module._wait_and_warmup(arguments, callback="then")
    assert asked_before == [["/server_info"] * (listens and attempts > 0)]
    refused = attempts - len(scheduler.asked)
    assert scheduler.waited_s == refused * launcher.RETRY_S
    assert warns in caplog.text
    assert bool(caplog.text) == bool(warns)
