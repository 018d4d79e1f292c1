"""The command ``regress`` with a stand-in for the engine (``engine_for_regress``): its processes are real ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from releases import ROOT
from sglang_moe_patches import cli
from sglang_moe_patches.lab.regress import regress, report
from sglang_moe_patches.lab.servers import folders, gpu, server, supervisor
from sglang_moe_patches.lab.servers.interrupts import SIGNALS
from sglang_moe_patches.lab.servers.server import Server

STANDIN = ROOT / "test/standins/engine_for_regress"
FAMILY = 6
"""Processes of a running stand-in: supervisor, server, worker, daemon and resource tracker, and ``regress``."""
QUESTIONS = 100
"""All answered alike, they show a drop to be below three points."""


class Given:
    """A command with a model, questions, a place for its report, and a stand-in for the engine on PYTHONPATH.

    The stand-in notes what happens in ``folder``.
    """

    def __init__(self, tmp_path: Path) -> None:
        self.folder, self.output = tmp_path / "events", tmp_path / "report"
        self.marker = uuid.uuid4().hex
        model, data = tmp_path / "model", tmp_path / "test.jsonl"
        for folder in (self.folder, model):
            folder.mkdir()
        (model / "config.json").write_text("{}")
        data.write_text(
            "".join(json.dumps({"question": f"{i}?", "answer": f"#### {i}"}) + "\n" for i in range(QUESTIONS))
        )
        self.arguments = ["regress", "--model", str(model), "--output", str(self.output)]
        self.arguments += ["--data-path", str(data), "--num-questions", str(QUESTIONS)]
        # Not in tmp_path: sockets have short paths.
        self.temporary = Path(tempfile.mkdtemp(prefix="t"))

    def command(self, *more: str) -> list[str]:
        return [*self.arguments, *more, "--", "--device", "cpu"]

    def environment(self, *wrong: str) -> dict[str, str]:
        """:param wrong: what is to go wrong in the stand-in."""
        return {
            "PYTHONPATH": os.pathsep.join([str(STANDIN), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "STANDIN_FOLDER": str(self.folder),
            "STANDIN": ",".join(wrong),
            "MARKER": self.marker,
            # Where nobody listens: the proxy is not for this machine's own servers.
            "HTTP_PROXY": "http://127.0.0.1:9",
            "TMPDIR": str(self.temporary),
        }

    def processes(self) -> list[psutil.Process]:
        """Those that the command has started."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("MARKER") == self.marker and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.AccessDenied, psutil.NoSuchProcess):
                continue
        return [process for process in found if process.pid != os.getpid()]

    @contextmanager
    def nothing_left(self) -> Iterator[None]:
        """Of the processes that it starts within the block."""
        yield
        left = self.processes()
        for process in left:
            process.kill()
        assert left == []

    def had(self) -> list[Path]:
        """What its servers had in shared memory and of temporary files."""
        return [Path(line) for name in self.folder.glob("has-*") for line in name.read_text().splitlines()]

    def has_left_nothing(self, servers: int) -> None:
        assert self.processes() == []
        assert len(self.had()) == 3 * servers
        assert [path for path in self.had() if path.exists()] == []
        assert list(self.temporary.iterdir()) == []

    def start(self, *wrong: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "sglang_moe_patches.cli", *self.command()],
            env={**os.environ, **self.environment(*wrong)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def here(self, monkeypatch, *wrong: str, more: tuple[str, ...] = ()) -> int:
        """The exit code of the command in this process."""
        for name, value in self.environment(*wrong).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["sglang-moe-patches", *self.command(*more)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert isinstance(ended.value.code, int)
        return ended.value.code

    def happened(self, name: str) -> bool:
        return (self.folder / name).exists()


@pytest.fixture
def given(tmp_path):
    given = Given(tmp_path)
    tempfile.tempdir = None  # a command in this process has a place of its own for temporary files
    with given.nothing_left():
        yield given
    tempfile.tempdir = None
    shutil.rmtree(given.temporary)


def wait_until(condition, process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)


# --- A whole run ------------------------------------------------------------------------------------------------------


def test_a_run_ends_with_a_report_and_leaves_nothing_else(given, monkeypatch, capsys):
    """Though a server ends its own resource tracker with SIGKILL, as the engine does."""
    monkeypatch.setattr(server, "SAID_EVERY_S", -1.0)
    assert given.here(monkeypatch) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "All 100 answers are identical" in shown
    assert {path.name for path in given.output.iterdir()} == {"patched.log", "report.html", "report.json", "stock.log"}
    runs = json.loads((given.output / "report.json").read_text())["runs"]
    assert [answer["predicted"] for answer in runs["patched"]["answers"]] == list(range(QUESTIONS))
    assert runs["patched"]["changes"] == [["output-buffer", "applied", ""]]
    # Not compared: stock, which starts first, warms the caches for patched.
    assert "tart-up" not in shown + (given.output / "report.html").read_text()
    # What it can show is said before, and how long it takes while it runs.
    first = "100 questions to each server, one server after the other. If both are equally good"
    assert shown.index(first) < shown.index("stock: ready after")
    assert re.search("stock: 100 of 100 answered, about 0 s left; then patched, about [0-9]+ s", shown)
    assert "patched: 100 of 100 answered, about 0 s left" in shown
    assert "left; then patched" not in shown.partition("patched: ")[2]
    assert given.happened("asked-to-end-stock")
    assert given.happened("asked-to-end-patched")
    given.has_left_nothing(servers=2)


@pytest.mark.parametrize(
    ("seconds", "said"), [(4.4, "4 s"), (99, "99 s"), (100, "2 min"), (5990, "100 min"), (6000, "1.7 h")]
)
def test_times_for_people(seconds, said):
    assert regress.spoken(seconds) == said


# --- Signals ----------------------------------------------------------------------------------------------------------


def running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two
        return False


def at(stage: str, given: Given) -> subprocess.Popen[str]:
    """``regress``, with its servers started, or asking questions."""
    process = given.start("slow answers" if stage == "evaluating" else "never ready")
    if stage == "evaluating":
        wait_until(lambda: given.happened("evaluating"), process)
    else:
        wait_until(lambda: len(given.processes()) == FAMILY, process)
    return process


@pytest.mark.parametrize(
    ("stage", "number"),
    [
        ("starting", signal.SIGTERM),
        ("evaluating", signal.SIGINT),
        ("ending", signal.SIGTERM),
        pytest.param("starting", signal.SIGINT, marks=pytest.mark.product),
        pytest.param("evaluating", signal.SIGTERM, marks=pytest.mark.product),
        pytest.param("ending", signal.SIGINT, marks=pytest.mark.product),
    ],
)
def test_two_signals_leave_no_process_and_no_report(given, stage, number):
    process = at(stage, given)
    others = [other for other in given.processes() if other.pid != process.pid]
    process.send_signal(number)
    time.sleep(0.002)
    process.send_signal(number)
    while stage == "ending" and any(map(running, others)):  # one at every moment of it
        process.send_signal(number)
        time.sleep(0.002)
    _, message = process.communicate()
    assert process.returncode == 130, message
    assert message.strip() == "sglang-moe-patches: interrupted; the servers are stopped and no report was written"
    assert given.processes() == []
    assert not given.output.exists()


def test_a_server_that_does_not_listen_is_ended_all_the_same_and_leaves_nothing(given, tmp_path):
    environment = {**os.environ, **given.environment("deaf"), "SGLANG_MOE_PATCHES_OBSERVE": str(tmp_path)}
    with Server("x", [], environment, tmp_path / "log"):
        assert all(path.exists() for path in given.had())
        # One has left the session and lost its parent.
        assert len({os.getsid(process.pid) for process in given.processes()}) == 2
        assert len(given.processes()) == FAMILY - 1
    assert not given.happened("asked-to-end-patched")
    given.has_left_nothing(servers=1)


@pytest.mark.parametrize("stage", ["starting", pytest.param("evaluating", marks=pytest.mark.product), "of patched"])
def test_a_killed_regress_leaves_no_file_and_loses_none(given, stage):
    if stage == "of patched":
        process = given.start("slow patched answers")
        asked = given.folder / "evaluating"  # a line each time
        wait_until(lambda: given.happened("started-patched") and asked.read_text().count("\n") == 2, process)
    else:
        process = at(stage, given)
    process.kill()
    process.communicate()
    wait_until(lambda: given.processes() == [])
    given.has_left_nothing(servers=2 if stage == "of patched" else 1)
    names = {path.name for path in given.output.iterdir()}
    assert names == {"stock.log", *({"stock.json", "patched.log"} if stage == "of patched" else ())}
    if stage == "of patched":
        assert len(json.loads((given.output / "stock.json").read_text())["answers"]) == QUESTIONS


def test_shared_memory_that_somebody_else_has_stays(tmp_path):
    """What the family has made, and somebody else has still."""
    path = Path("/dev/shm") / f"standin-{uuid.uuid4().hex}"
    script = f"import mmap, time; f = open({str(path)!r}, 'w+b'); f.truncate(99); m = mmap.mmap(f.fileno(), 99)"
    script += "; print(flush=True); time.sleep(3600)"
    command = [sys.executable, "-c", script]
    with (tmp_path / "log").open("wb") as log:
        kept = supervisor.Supervised(command, dict(os.environ), log)
    wait_until(lambda: (tmp_path / "log").read_bytes())
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        try:
            other.stdout.readline()
            kept.end()
            assert path.exists()
        finally:
            other.kill()
            path.unlink()


def test_a_signal_between_the_servers_keeps_what_stock_answered(given, monkeypatch):
    monkeypatch.setattr(gpu, "wait_until_free", lambda before, while_waiting: os.kill(os.getpid(), signal.SIGTERM))
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        assert given.here(monkeypatch) == 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert len(json.loads((given.output / "stock.json").read_text())["answers"]) == QUESTIONS


def test_processes_that_cannot_be_ended_are_named_and_end_the_run(given, monkeypatch, capsys):
    """A process that waits for a driver outlives SIGKILL."""
    wait = supervisor.end_family
    monkeypatch.setattr(supervisor, "end_family", lambda root, patience: [*wait(root, patience), psutil.Process()])
    assert given.here(monkeypatch) == 2
    error = capsys.readouterr().err
    assert f"still running after 120 s: {os.getpid()} (" in error
    assert "worse" not in error
    assert not given.happened("started-patched")


def test_the_family_is_ended_even_if_its_supervisor_hangs(given, tmp_path, monkeypatch):
    environment = {**os.environ, **given.environment(), "SGLANG_MOE_PATCHES_OBSERVE": str(tmp_path)}
    monkeypatch.setattr(supervisor, "OURS_S", 0.5)
    with Server("x", [], environment, tmp_path / "log") as server:
        server._process._root.suspend()
    assert given.processes() == []
    assert list(given.temporary.iterdir()) == []
    for path in given.had():  # the supervisor would have removed them
        path.unlink(missing_ok=True)


# --- Failures ---------------------------------------------------------------------------------------------------------


def test_only_the_patched_server_fails(given, monkeypatch, capsys):
    assert given.here(monkeypatch, "patched cannot start") == 1
    error = capsys.readouterr().err
    assert "worse: the patched server failed" in error
    assert "no such model" in error
    assert {path.name for path in given.output.iterdir()} == {"stock.json", "stock.log", "patched.log"}


@pytest.mark.parametrize(
    ("wrong", "more", "words", "is_asked"),
    [
        ("stock cannot start", (), "the stock server ended with exit code 1 at start-up", False),
        ("no answers", (), "the evaluation of http://127.0.0.1:", True),
        ("never ready", ("--startup-timeout", "1"), "not ready after 1 s (--startup-timeout gives it longer)", False),
        ("no plugin", (), "the stock server did not load this package's plugin", False),
    ],
)
def test_a_run_that_cannot_be_made(given, monkeypatch, capsys, wrong, more, words, is_asked):
    assert given.here(monkeypatch, wrong, more=more) == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in given.output.iterdir()] == ["stock.log"]
    assert given.happened("evaluating") == is_asked


def test_what_was_answered_is_kept_when_the_report_fails(given, monkeypatch, capsys):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "write", full)
    assert given.here(monkeypatch) == 2
    shown, error = capsys.readouterr()
    assert "No space left on device" in error
    assert "All 100 answers are identical" in shown
    for name in ("stock", "patched"):
        assert f"Kept: {given.output / name}.json" in shown
        assert len(json.loads((given.output / f"{name}.json").read_text())["answers"]) == QUESTIONS


def test_what_must_not_be_lost_is_kept_elsewhere_when_the_folder_is_gone(tmp_path):
    (tmp_path / "file").touch()
    kept = folders.keep({"stock.json": b"[]"}, tmp_path / "file")
    assert (kept / "stock.json").read_bytes() == b"[]"
    shutil.rmtree(kept)


# --- GPU memory -------------------------------------------------------------------------------------------------------

NVIDIA_SMI = """#!{python}
import sys
from pathlib import Path
assert "--query-gpu=index,name,memory.used" in sys.argv
for index, used in enumerate(Path({file!r}).read_text().split()):
    print(f"{{index}}, NVIDIA H200, {{used}}")
"""


@pytest.fixture
def used(given, tmp_path, monkeypatch):
    """A file with the MiB in use on each GPU, as ``nvidia-smi`` tells them."""
    file = given.folder / "used"
    file.write_text("300 200")
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(NVIDIA_SMI.format(python=sys.executable, file=str(file)))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    return file


def test_the_next_server_waits_until_the_gpus_memory_is_free(used):
    before = gpu.used_mib()
    assert before == {"GPU 0 (NVIDIA H200)": 300, "GPU 1 (NVIDIA H200)": 200}
    used.write_text("400 40000")
    looks = []

    def look():
        looks.append(1)
        if len(looks) == 2:
            used.write_text("400 200")

    gpu.wait_until_free(before, look)
    assert len(looks) == 2


def test_memory_that_does_not_come_back_is_not_the_patched_servers_fault(given, used, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "PATIENCE_S", 0.5)
    assert given.here(monkeypatch, "holds memory") == 2
    assert "GPU 0 (NVIDIA H200) has 40,000 MiB in use, 300 before the stock server" in capsys.readouterr().err
    assert not given.happened("started-patched")
    assert (given.output / "stock.json").exists()


def test_without_nvidia_smi_nothing_is_waited_for(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpu.used_mib() == {}
    gpu.wait_until_free({}, lambda: pytest.fail("waited"))
