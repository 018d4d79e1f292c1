"""One engine server for the length of a ``with`` block: started, waited for, and ended with every process it made."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import TracebackType

TAIL_LINES = 30


class ServerFailed(RuntimeError):
    """The server ended, or did not get ready in time. The message carries the end of its log."""


def free_port() -> int:
    """A port on which nothing listens, nor on the one 10,000 above it, which the engine takes for gRPC.

    Both lie below 32768, from where on Linux gives ports to outgoing connections: a server binds its port many seconds
    after it was chosen.
    """
    while True:
        port = random.randrange(20000, 22768)
        if not port_in_use(port) and not port_in_use(port + 10000):
            return port


def port_in_use(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Server:
    """``python -m sglang.launch_server`` on a loopback port.

    :param name: for messages.
    :param arguments: server arguments, without host and port.
    :param environment: the whole environment of the process.
    :param log: file that takes the server's output.
    :param timeout: seconds until the server must answer.
    :param progress: called about twice a second while waiting, with the seconds waited and the log's last line.
    """

    def __init__(
        self,
        name: str,
        arguments: list[str],
        environment: dict[str, str],
        log: Path,
        *,
        timeout: float = 1800,
        port: int | None = None,
        progress: Callable[[float, str], None] = lambda seconds, line: None,
    ) -> None:
        self.name = name
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [
            *(sys.executable, "-m", "sglang.launch_server"),
            *arguments,
            *("--host", "127.0.0.1", "--port", str(self.port)),
        ]
        self.environment = environment
        self.log = log
        self.timeout = timeout
        self.progress = progress
        self.startup_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        started = time.monotonic()
        with self.log.open("wb") as output:
            # A session of its own: Ctrl-C reaches us alone, and everything the server starts can be found again.
            self._process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            while not self._healthy():
                waited = time.monotonic() - started
                if self._process.poll() is not None:
                    raise ServerFailed(self._message(f"ended with exit code {self._process.returncode} at start-up"))
                if waited > self.timeout:
                    raise ServerFailed(self._message(f"was not ready after {self.timeout:.0f} s"))
                self.progress(waited, self.last_line())
                time.sleep(0.5)
        except BaseException:
            self.stop()
            raise
        self.startup_s = time.monotonic() - started
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def check(self) -> None:
        """:raises ServerFailed: the server has ended."""
        if self._process is None or self._process.poll() is not None:
            code = None if self._process is None else self._process.returncode
            raise ServerFailed(self._message(f"ended with exit code {code}"))

    def stop(self) -> None:
        """End every process of the server's session. Nothing is left running when this returns."""
        import psutil

        if self._process is None:
            return
        session = self._process.pid
        members = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == session:
                    members.append(process)
            except (ProcessLookupError, PermissionError):
                continue
        for process in members:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(members, timeout=30)
        self._process.wait()

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def log_tail(self) -> str:
        tail = "\n".join(self.log_text().splitlines()[-TAIL_LINES:])
        return f"The end of {self.log.name}:\n{tail}"

    def last_line(self) -> str:
        lines = [line for line in self.log_text()[-4096:].splitlines() if line.strip()]
        return lines[-1] if lines else ""

    def _healthy(self) -> bool:
        import httpx

        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def _message(self, what: str) -> str:
        return f"the {self.name} server {what}. {self.log_tail()}"
