"""Run one engine server for the length of a ``with`` block, and end all of its processes after the block."""

from __future__ import annotations

import http.client
import os
import random
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_moe_patches.lab.servers import folders
from sglang_moe_patches.lab.servers.supervisor import Supervised

if TYPE_CHECKING:
    from rich.console import Console

PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
"""Pattern for the error message of PyTorch's store, ZeroMQ or uvicorn if another process already listens on a port."""


class ServerFailed(RuntimeError):
    """Raised if the server ended too early, or was not ready in time. The message ends with the last lines of the
    server's log."""


def free_port() -> int:
    """Return a free port. The port 10,000 above it is also free, because the engine uses that port for gRPC.

    Both ports lie below 32768, because Linux could assign a higher port to an outgoing connection before the server
    binds it.
    """
    while True:
        port = random.randrange(20000, 22768)
        if not port_in_use(port) and not port_in_use(port + 10000):
            return port


def port_in_use(port: int) -> bool:
    """Return whether a process on this machine listens on the port."""
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Server:
    """Server process, ``python -m sglang.launch_server``, that listens on 127.0.0.1.

    At the start, the engine chooses further ports, and binds them many seconds later. Another process may take such a
    port meanwhile. The start then fails, and the server is started a second time.

    :param name: name for messages.
    :param arguments: server arguments, without host and port.
    :param environment: complete environment of the process.
    :param log: file for the server's output.
    :param timeout: seconds until the server must answer.
    :param port: port to listen on; ``None`` to choose a free port.
    :param progress: function that is called about twice a second while the server starts, with the seconds since the
        start and the last line of the log. The function can raise an exception to end the server.
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
        self._arguments, self._requested_port = arguments, port
        self.port = port or free_port()
        self.environment = environment
        self.log = log
        self.timeout = timeout
        self.progress = progress
        self.startup_s = 0.0
        self._process: Supervised | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "sglang.launch_server"),
            *self._arguments,
            *("--host", "127.0.0.1", "--port", str(self.port)),
        ]

    def __enter__(self) -> Server:
        try:
            return self._start()
        except ServerFailed:
            if not PORT_TAKEN.search(self.log_text()):
                raise
        self.port = self._requested_port or free_port()
        return self._start()

    def _start(self) -> Server:
        started = time.monotonic()
        with self.log.open("wb") as output:
            self._process = Supervised(self.command, self.environment, output, scratch=folders.scratch_folders)
        try:
            while not self._is_healthy():
                waited = time.monotonic() - started
                self.check("at start-up")
                if waited > self.timeout:
                    raise self._failure(f"was not ready after {self.timeout:.0f} s (--startup-timeout sets the limit)")
                self.progress(waited, self.last_line())
                time.sleep(0.5)
        except BaseException:
            self.stop()
            raise
        self.startup_s = time.monotonic() - started
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def check(self, when: str = "") -> None:
        """Raise an error if the server has ended.

        :param when: moment of the check in words, for the error message.
        :raises ServerFailed: the server has ended.
        """
        code = None if self._process is None else self._process.exit_code()
        if self._process is None or code is not None:
            raise self._failure(f"ended with exit code {code} {when}".rstrip())

    def stop(self) -> None:
        """End every process that the server started. Return when the last process has ended.

        :raises StillRunning: a process cannot be ended. The message names the process.
        """
        if self._process is not None:
            self._process.end()

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def log_tail(self) -> str:
        tail = "\n".join(self.log_text().splitlines()[-30:])
        return f"The end of {self.log.name}:\n{tail}"

    def last_line(self) -> str:
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
            lines = log.read().decode(errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.strip()), "")

    def _is_healthy(self) -> bool:
        # This runs twice a second for minutes. http.client needs no TLS context and reads no proxy settings.
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)) as connection:
            try:
                connection.request("GET", "/health")
                return connection.getresponse().status == 200
            except (OSError, http.client.HTTPException):
                return False

    def _failure(self, event: str) -> ServerFailed:
        return ServerFailed(f"the {self.name} server {event}. {self.log_tail()}")


PROGRESS_INTERVAL_S = 30.0
"""Seconds between two progress lines if the output is not a terminal."""


@contextmanager
def show_progress(console: Console, activity: str) -> Iterator[Callable[..., None]]:
    """Context manager that shows progress: in one changing line on a terminal, otherwise in one line every 30 seconds.

    :param activity: line to show until the first update.
    :returns: a function that updates the line. Its arguments are the seconds since the start, a line, and a text that
        is appended only on a terminal.
    """
    last_print_s = 0.0
    with console.status(activity, refresh_per_second=4) as status:

        def update(seconds: float, line: str, more: str = "") -> None:
            nonlocal last_print_s
            status.update(line + more)
            if not console.is_terminal and seconds - last_print_s >= PROGRESS_INTERVAL_S:
                last_print_s = seconds
                console.print(line, highlight=False)

        yield update


@contextmanager
def show_starting(server: Server, console: Console, interrupt: Callable[[], None]) -> Iterator[None]:
    """Context manager that shows how long the server has been starting, and the last line of its log.

    :param interrupt: function that is called about twice a second. The function can raise an exception to end the
        server.
    """
    with show_progress(console, f"{server.name}: starting") as update:

        def show(seconds: float, line: str) -> None:
            interrupt()
            update(seconds, f"{server.name}: starting, {seconds:.0f} s", f"  [dim]{line[:100].replace('[', '(')}[/]")

        server.progress = show
        yield
