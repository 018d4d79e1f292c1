"""Tests of the command ``regress`` with real processes. A stand-in replaces the engine
(``test/standins/engine_for_regress``)."""

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
PROCESS_COUNT = 6
"""Number of processes while a server runs: ``regress``, supervisor, server, worker, daemon and resource tracker."""
QUESTIONS = 100
"""Number of questions in a run. If no answer differs, 99 questions suffice for the verdict *no worse*."""


class Regression:
    """A ``regress`` command with a model, questions, and a folder for its report. The command starts stand-ins for the
    engine. A stand-in creates a file in ``folder`` for each event, such as its start."""

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
        # This folder is not in tmp_path, because the path of a socket must be short.
        self.temporary = Path(tempfile.mkdtemp(prefix="t"))

    def command(self, *more: str) -> list[str]:
        return [*self.arguments, *more, "--", "--device", "cpu"]

    def environment(self, *faults: str) -> dict[str, str]:
        """Return the environment variables of the command.

        :param faults: names of the faults that the stand-in simulates.
        """
        return {
            "PYTHONPATH": os.pathsep.join([str(STANDIN), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "STANDIN_FOLDER": str(self.folder),
            "STANDIN": ",".join(faults),
            "MARKER": self.marker,
            # Nobody listens at this address. Requests to servers on this machine must not use a proxy.
            "HTTP_PROXY": "http://127.0.0.1:9",
            "TMPDIR": str(self.temporary),
        }

    def processes(self) -> list[psutil.Process]:
        """Return the running processes that the command started."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("MARKER") == self.marker and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.AccessDenied, psutil.NoSuchProcess):
                continue
        return [process for process in found if process.pid != os.getpid()]

    @contextmanager
    def check_no_process_left(self) -> Iterator[None]:
        """Context manager. After the block, check that no process of the command is still running."""
        yield
        left = self.processes()
        for process in left:
            process.kill()
        assert left == []

    def server_files(self) -> list[Path]:
        """Return the paths of the shared memory and the temporary files that the servers created."""
        return [Path(line) for name in self.folder.glob("has-*") for line in name.read_text().splitlines()]

    def check_nothing_left(self, servers: int) -> None:
        """Check that ``servers`` servers ran, and that they left no process and no file behind."""
        assert self.processes() == []
        assert len(self.server_files()) == 3 * servers
        assert [path for path in self.server_files() if path.exists()] == []
        assert list(self.temporary.iterdir()) == []

    def start(self, *faults: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "sglang_moe_patches.cli", *self.command()],
            env={**os.environ, **self.environment(*faults)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run_in_process(self, monkeypatch, *faults: str, more: tuple[str, ...] = ()) -> int:
        """Run the command in this process and return its exit code."""
        for name, value in self.environment(*faults).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["sglang-moe-patches", *self.command(*more)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert isinstance(ended.value.code, int)
        return ended.value.code

    def has_event(self, name: str) -> bool:
        return (self.folder / name).exists()


@pytest.fixture
def regression(tmp_path):
    regression = Regression(tmp_path)
    tempfile.tempdir = None  # Python then reads TMPDIR again when it needs a temporary folder
    with regression.check_no_process_left():
        yield regression
    tempfile.tempdir = None
    shutil.rmtree(regression.temporary)


def wait_until(condition, process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)


# --- A complete run ---------------------------------------------------------------------------------------------------


def test_a_run_ends_with_a_report_and_leaves_nothing_else(regression, monkeypatch, capsys):
    """A complete run leaves only its report and the servers' logs: no process and no temporary file. The engine's
    stand-in kills its own resource tracker, as the engine does, so this tracker cannot clean up."""
    monkeypatch.setattr(server, "PROGRESS_INTERVAL_S", -1.0)
    assert regression.run_in_process(monkeypatch) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "All 100 answers are identical" in shown
    assert {path.name for path in regression.output.iterdir()} == {
        "patched.log",
        "report.html",
        "report.json",
        "stock.log",
    }
    runs = json.loads((regression.output / "report.json").read_text())["runs"]
    assert [answer["predicted"] for answer in runs["patched"]["answers"]] == list(range(QUESTIONS))
    assert runs["patched"]["changes"] == [["output-buffer", "applied", ""]]
    # Start times are not reported: the stock server warms the caches for the patched server.
    assert "tart-up" not in shown + (regression.output / "report.html").read_text()
    # The command first prints what the run can show, and then, while it runs, the remaining time.
    announcement = "100 questions to each server, one server after the other. If the servers are equally good"
    assert shown.index(announcement) < shown.index("stock: ready after")
    assert re.search("stock: 100 of 100 answered, about 0 s left; then the patched server, about [0-9]+ s", shown)
    assert "patched: 100 of 100 answered, about 0 s left" in shown
    assert "left; then the patched" not in shown.partition("patched: ")[2]
    assert regression.has_event("asked-to-end-stock")
    assert regression.has_event("asked-to-end-patched")
    regression.check_nothing_left(servers=2)


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.4, "4 s"), (99, "99 s"), (100, "2 min"), (5990, "100 min"), (6000, "1.7 h")]
)
def test_durations_are_formatted_with_a_fitting_unit(seconds, text):
    assert regress.format_duration(seconds) == text


# --- Signals ----------------------------------------------------------------------------------------------------------


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # the process ended between the two calls
        return False


def start_until(stage: str, regression: Regression) -> subprocess.Popen[str]:
    """Start ``regress``, wait for its first server, and return the process of ``regress``. If ``stage`` is
    *evaluating*, wait until the server answers questions. Otherwise, wait until all of its processes run."""
    process = regression.start("slow answers" if stage == "evaluating" else "never ready")
    if stage == "evaluating":
        wait_until(lambda: regression.has_event("evaluating"), process)
    else:
        wait_until(lambda: len(regression.processes()) == PROCESS_COUNT, process)
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
def test_two_signals_leave_no_process_and_no_report(regression, stage, number):
    process = start_until(stage, regression)
    others = [other for other in regression.processes() if other.pid != process.pid]
    process.send_signal(number)
    time.sleep(0.002)
    process.send_signal(number)
    while stage == "ending" and any(map(is_running, others)):  # signals arrive at many moments while the servers end
        process.send_signal(number)
        time.sleep(0.002)
    _, message = process.communicate()
    assert process.returncode == 130, message
    assert message.strip() == "sglang-moe-patches: interrupted; the servers are stopped and no report was written"
    assert regression.processes() == []
    assert not regression.output.exists()


def test_a_server_that_ignores_sigterm_is_ended_and_leaves_nothing(regression, tmp_path):
    environment = {**os.environ, **regression.environment("deaf"), "SGLANG_MOE_PATCHES_OBSERVE": str(tmp_path)}
    with Server("x", [], environment, tmp_path / "log"):
        assert all(path.exists() for path in regression.server_files())
        # One process of the server has a session of its own, and its parent has ended.
        assert len({os.getsid(process.pid) for process in regression.processes()}) == 2
        assert len(regression.processes()) == PROCESS_COUNT - 1
    assert not regression.has_event("asked-to-end-patched")
    regression.check_nothing_left(servers=1)


@pytest.mark.parametrize("stage", ["starting", pytest.param("evaluating", marks=pytest.mark.product), "patched server"])
def test_a_killed_regress_leaves_no_server_file_and_keeps_logs_and_answers(regression, stage):
    if stage == "patched server":
        process = regression.start("slow patched answers")
        asked = regression.folder / "evaluating"  # one line for each evaluation
        wait_until(lambda: regression.has_event("started-patched") and asked.read_text().count("\n") == 2, process)
    else:
        process = start_until(stage, regression)
    process.kill()
    process.communicate()
    wait_until(lambda: regression.processes() == [])
    regression.check_nothing_left(servers=2 if stage == "patched server" else 1)
    names = {path.name for path in regression.output.iterdir()}
    assert names == {"stock.log", *({"stock.json", "patched.log"} if stage == "patched server" else ())}
    if stage == "patched server":
        assert len(json.loads((regression.output / "stock.json").read_text())["answers"]) == QUESTIONS


def test_shared_memory_that_another_process_still_maps_is_kept(tmp_path):
    """Ending a command must not remove its shared memory if an unrelated process still maps it."""
    path = Path("/dev/shm") / f"standin-{uuid.uuid4().hex}"
    script = f"import mmap, time; f = open({str(path)!r}, 'w+b'); f.truncate(99); m = mmap.mmap(f.fileno(), 99)"
    script += "; print(flush=True); time.sleep(3600)"
    command = [sys.executable, "-c", script]
    with (tmp_path / "log").open("wb") as log:
        supervised = supervisor.Supervised(command, dict(os.environ), log)
    wait_until(lambda: (tmp_path / "log").read_bytes())
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        try:
            other.stdout.readline()
            supervised.end()
            assert path.exists()
        finally:
            other.kill()
            path.unlink()


def test_a_supervised_process_can_set_its_title_after_pytorch_has_set_the_folder_of_its_cache(tmp_path):
    """A supervised process must be able to set its title after PyTorch has set ``TORCHINDUCTOR_CACHE_DIR``.

    ``setproctitle`` needs the memory in which the first environment variable lay when the process started. If the
    process sets its first variable again, the variable moves, and ``setproctitle`` fails. PyTorch sets
    ``TORCHINDUCTOR_CACHE_DIR`` in the process. So ``Supervised`` must not put this variable first.
    """
    script = "import os, setproctitle; os.environ['TORCHINDUCTOR_CACHE_DIR'] = '/cache'"
    script += "; setproctitle.setproctitle('a title'); print(open('/proc/self/cmdline').read().strip(chr(0)))"
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    with (tmp_path / "log").open("wb") as log:
        supervised = supervisor.Supervised([sys.executable, "-c", script], environment, log)
    wait_until(lambda: supervised.exit_code() is not None)
    supervised.end()
    assert (tmp_path / "log").read_text() == "a title\n"


def test_a_signal_between_the_two_servers_keeps_the_stock_answers(regression, monkeypatch):
    monkeypatch.setattr(gpu, "wait_until_free", lambda before, while_waiting: os.kill(os.getpid(), signal.SIGTERM))
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        assert regression.run_in_process(monkeypatch) == 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert len(json.loads((regression.output / "stock.json").read_text())["answers"]) == QUESTIONS


def test_processes_that_cannot_be_ended_are_named_and_end_the_run(regression, monkeypatch, capsys):
    """If a process survives SIGKILL, for example because it waits for a driver, ``regress`` must name it and end the
    run."""
    wait = supervisor.end_family
    monkeypatch.setattr(supervisor, "end_family", lambda root, patience: [*wait(root, patience), psutil.Process()])
    assert regression.run_in_process(monkeypatch) == 2
    error = capsys.readouterr().err
    assert f"still running 120 s after SIGKILL; end them before you start again: {os.getpid()} (" in error
    assert "worse" not in error
    assert not regression.has_event("started-patched")


def test_all_processes_are_ended_even_if_their_supervisor_hangs(regression, tmp_path, monkeypatch):
    environment = {**os.environ, **regression.environment(), "SGLANG_MOE_PATCHES_OBSERVE": str(tmp_path)}
    monkeypatch.setattr(supervisor, "SUPERVISOR_TIMEOUT_S", 0.5)
    with Server("x", [], environment, tmp_path / "log") as server:
        server._process._root.suspend()
    assert regression.processes() == []
    assert list(regression.temporary.iterdir()) == []
    for path in regression.server_files():  # the suspended supervisor did not remove the files
        path.unlink(missing_ok=True)


# --- Failures ---------------------------------------------------------------------------------------------------------


def test_a_patched_server_that_cannot_start_is_worse(regression, monkeypatch, capsys):
    assert regression.run_in_process(monkeypatch, "patched cannot start") == 1
    error = capsys.readouterr().err
    assert "worse: the patched server failed" in error
    assert "no such model" in error
    assert {path.name for path in regression.output.iterdir()} == {"stock.json", "stock.log", "patched.log"}


@pytest.mark.parametrize(
    ("fault", "more", "message", "is_asked"),
    [
        ("stock cannot start", (), "the stock server ended with exit code 1 at start-up", False),
        ("no answers", (), "the evaluation of http://127.0.0.1:", True),
        ("never ready", ("--startup-timeout", "1"), "not ready after 1 s (--startup-timeout sets the limit)", False),
        ("no plugin", (), "the stock server did not load this package's plugin", False),
    ],
)
def test_a_run_that_cannot_be_completed_ends_with_2_and_keeps_the_log(
    regression, monkeypatch, capsys, fault, more, message, is_asked
):
    assert regression.run_in_process(monkeypatch, fault, more=more) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in regression.output.iterdir()] == ["stock.log"]
    assert regression.has_event("evaluating") == is_asked


def test_answers_are_kept_if_the_report_cannot_be_written(regression, monkeypatch, capsys):
    def disk_full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "write", disk_full)
    assert regression.run_in_process(monkeypatch) == 2
    shown, error = capsys.readouterr()
    assert "No space left on device" in error
    assert "All 100 answers are identical" in shown
    for name in ("stock", "patched"):
        assert f"Answers kept in {regression.output / name}.json" in shown
        assert len(json.loads((regression.output / f"{name}.json").read_text())["answers"]) == QUESTIONS


def test_files_are_kept_elsewhere_if_the_folder_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    folder = folders.save_files({"stock.json": b"[]"}, tmp_path / "file")
    assert (folder / "stock.json").read_bytes() == b"[]"
    shutil.rmtree(folder)


# --- GPU memory -------------------------------------------------------------------------------------------------------

NVIDIA_SMI = """#!{python}
import sys
from pathlib import Path
assert "--query-gpu=index,name,memory.used" in sys.argv
for index, used in enumerate(Path({file!r}).read_text().split()):
    print(f"{{index}}, NVIDIA H200, {{used}}")
"""


@pytest.fixture
def used_memory_file(regression, tmp_path, monkeypatch):
    """File with the used MiB of each GPU. A stand-in for ``nvidia-smi`` prints the content of this file."""
    file = regression.folder / "used"
    file.write_text("300 200")
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(NVIDIA_SMI.format(python=sys.executable, file=str(file)))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    return file


def test_the_patched_server_waits_until_the_gpus_memory_is_free(used_memory_file):
    before = gpu.read_used_mib()
    assert before == {"GPU 0 (NVIDIA H200)": 300, "GPU 1 (NVIDIA H200)": 200}
    used_memory_file.write_text("400 40000")
    calls = []

    def free_at_the_second_call():
        calls.append(1)
        if len(calls) == 2:
            used_memory_file.write_text("400 200")

    gpu.wait_until_free(before, free_at_the_second_call)
    assert len(calls) == 2


def test_gpu_memory_that_stays_in_use_makes_the_run_inconclusive(regression, used_memory_file, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "TIMEOUT_S", 0.5)
    assert regression.run_in_process(monkeypatch, "holds memory") == 2
    assert (
        "GPU 0 (NVIDIA H200) has 40,000 MiB in use. Before the stock server started, it had 300 MiB"
        in capsys.readouterr().err
    )
    assert not regression.has_event("started-patched")
    assert (regression.output / "stock.json").exists()


def test_without_nvidia_smi_the_patched_server_does_not_wait(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpu.read_used_mib() == {}
    gpu.wait_until_free({}, lambda: pytest.fail("waited"))
