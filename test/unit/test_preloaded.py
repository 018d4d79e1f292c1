"""Tests of the fork server that speeds up the start of test servers (``test/standins/preloaded``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
from releases import ROOT

LAUNCHER = """
import ctypes, multiprocessing, os, setproctitle, signal, sys, time
from engine_part import IMPORTED_BY

def child(pipe):
    setproctitle.setproctitle("a part")
    title = open("/proc/self/cmdline").read().strip("\\0")
    pipe.send(("torch" in sys.modules, IMPORTED_BY == os.getpid(), os.environ["SAID"], title, os.getppid()))
    pipe.recv()
    # Like a process of the engine, it ends with its parent, and signals a failure to its parent.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.kill(os.getppid(), signal.SIGQUIT)
    time.sleep(60)

def told(*received):
    print("a process has failed", flush=True)
    os._exit(3)

if __name__ == "__main__":
    signal.signal(signal.SIGQUIT, told)
    multiprocessing.set_start_method("spawn", force=True)
    os.environ["SAID"] = "by the launcher"
    worker = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0,))  # as uvicorn starts one
    worker.start()
    worker.join()
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.Process(target=child, args=(theirs,), daemon=True).start()
    print(*(ours.recv() if ours.poll(30) else ["nothing"]), sep="|", flush=True)
    ours.send("go on")
    time.sleep(30)
"""


def test_a_spawned_process_is_forked_with_its_environment_and_its_failure_ends_the_server(tmp_path: Path):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").touch()
    (tmp_path / "sglang/launch_server.py").write_text(LAUNCHER)
    (tmp_path / "engine_part.py").write_text("import os\nIMPORTED_BY = os.getpid()\n")
    path = os.pathsep.join([str(ROOT / "test/standins/preloaded"), str(tmp_path)])
    command = [sys.executable, "-m", "sglang.launch_server"]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path, "SAID": "before"}, stdout=subprocess.PIPE, text=True
    ) as launcher:
        *seen, parent = launcher.stdout.readline().strip().split("|")
        assert seen == ["True", "True", "by the launcher", "a part"]
        server = psutil.Process(int(parent))
        assert server.ppid() == launcher.pid
        assert launcher.stdout.readline() == "a process has failed\n"
        assert launcher.wait() == 3
        server.wait(30)
