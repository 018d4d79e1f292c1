"""Stand-in for the engine's server in tests of ``regress``. It has the same processes, but no model.

- On SIGTERM it ends, and kills all its child processes with SIGKILL, as the engine does. This includes Python's
  resource tracker.
- Its other processes ignore every signal that can be ignored. One of them is a daemon in a session of its own.
- It has a semaphore and a queue in shared memory, and a temporary file.

It writes a file into ``STANDIN_FOLDER`` for each event, and the names of its semaphore, queue and temporary file. The
variable ``STANDIN`` is a comma-separated list of faults to simulate.
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

FAULTS = os.environ.get("STANDIN", "").split(",")
FOLDER = Path(os.environ["STANDIN_FOLDER"])
NAME = "stock" if os.environ.get("SGLANG_MOE_PATCHES") == "none" else "patched"


class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if "never ready" in FAULTS else 200)
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
    if f"{NAME} cannot start" in FAULTS:
        sys.exit("no such model")
    if os.fork() == 0:  # a worker
        time.sleep(3600)
    if os.fork() == 0:  # a daemon
        os.setsid()
        if os.fork() == 0:
            time.sleep(3600)
        os._exit(0)
    if "holds memory" in FAULTS:
        (FOLDER / "used").write_text("40000")
    if "no plugin" not in FAULTS:
        process = events.Process((events.ChangeStatus("output-buffer", "applied", ""),))
        process.memory = events.Memory("cpu", tokens=9, forwards=2)
        events.write(process, Path(os.environ[OBSERVE.name]) / f"{os.getpid()}.json")
    lock, queue = get_context("spawn").Lock(), SharedMemory(create=True, size=4096)
    with tempfile.NamedTemporaryFile(delete=False) as socket:
        name = lock._semlock.name.removeprefix("/")  # type: ignore[attr-defined]
        resources = [f"/dev/shm/sem.{name}", f"/dev/shm/{queue.name}", socket.name]
    (FOLDER / f"has-{NAME}").write_text("\n".join(resources))
    if "deaf" not in FAULTS:
        signal.signal(signal.SIGTERM, end)
    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Health).serve_forever()


if __name__ == "__main__":
    main()
