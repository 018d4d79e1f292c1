"""Stands in for the engine's server in tests of ``regress``: the same processes and questions, none of the model.

It ends on SIGTERM, and like the engine ends all its children then, with SIGKILL, Python's resource tracker too. Its
other processes ignore every signal that can be ignored; one has left the session and lost its parent. It has a
semaphore and a queue in shared memory and a temporary file. ``STANDIN_FOLDER`` takes a file for each thing that
happens, and the names of what it has; ``STANDIN`` is a comma-separated list of what goes wrong.
"""

import os
import signal
import sys
import tempfile
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
from sglang_moe_patches.core.variables import OBSERVE
from sglang_moe_patches.lab.observers import events

WRONG = os.environ.get("STANDIN", "").split(",")
FOLDER = Path(os.environ["STANDIN_FOLDER"])
NAME = "stock" if os.environ.get("SGLANG_MOE_PATCHES") == "none" else "patched"


class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if "never ready" in WRONG else 200)
        self.end_headers()

    def log_message(self, *args):
        pass


def end(number, frame):
    (FOLDER / f"asked-to-end-{NAME}").touch()
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(0)


def main():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    (FOLDER / f"started-{NAME}").touch()
    if f"{NAME} cannot start" in WRONG:
        sys.exit("no such model")
    if os.fork() == 0:  # a worker
        time.sleep(3600)
    if os.fork() == 0:  # a daemon
        os.setsid()
        if os.fork() == 0:
            time.sleep(3600)
        os._exit(0)
    if "holds memory" in WRONG:
        (FOLDER / "used").write_text("40000")
    if "no plugin" not in WRONG:
        process = events.Process((events.ChangeStatus("output-buffer", "applied", ""),))
        process.memory = events.Memory("cpu", tokens=9, forwards=2)
        events.write(process, Path(os.environ[OBSERVE.name]) / f"{os.getpid()}.json")
    lock, queue = get_context("spawn").Lock(), SharedMemory(create=True, size=4096)
    with tempfile.NamedTemporaryFile(delete=False) as socket:
        name = lock._semlock.name.removeprefix("/")  # type: ignore[attr-defined]
        has = [f"/dev/shm/sem.{name}", f"/dev/shm/{queue.name}", socket.name]
    (FOLDER / f"has-{NAME}").write_text("\n".join(has))
    if "deaf" not in WRONG:
        signal.signal(signal.SIGTERM, end)
    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Health).serve_forever()


if __name__ == "__main__":
    main()
