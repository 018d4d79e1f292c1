"""Stands in for the engine's server in tests of ``regress``: the same processes and questions, none of the model.

Its processes ignore every signal that can be ignored; one has left the session and lost its parent. ``STANDIN_FOLDER``
takes a file for each thing that happens; ``STANDIN`` is a comma-separated list of what goes wrong.
"""

import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from sglang_moe_patches.observers import events
from sglang_moe_patches.variables import OBSERVE

WRONG = os.environ.get("STANDIN", "").split(",")
FOLDER = Path(os.environ["STANDIN_FOLDER"])
NAME = "stock" if os.environ.get("SGLANG_MOE_PATCHES") == "none" else "patched"


class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if "never ready" in WRONG else 200)
        self.end_headers()

    def log_message(self, *args):
        pass


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
    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Health).serve_forever()


if __name__ == "__main__":
    main()
