"""One engine server for the length of a ``with`` block: started, waited for, and ended with every process it made."""

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
"""As PyTorch's store, ZeroMQ and uvicorn say it."""


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

    The engine chooses more ports, and listens on them many seconds later. Where one is taken by then, it is started
    once more: other servers that start meanwhile choose from the same.

    :param arguments: server arguments, without host and port.
    :param environment: the whole environment of the process.
    :param timeout: seconds until the server must answer.
    :param port: ``None``: a free one.
    :param progress: called about twice a second while waiting, with the seconds waited and the log's last line. What it
        raises ends the server.
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
        self._arguments, self._given_port = arguments, port
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
        self.port = self._given_port or free_port()
        return self._start()

    def _start(self) -> Server:
        started = time.monotonic()
        with self.log.open("wb") as output:
            self._process = Supervised(self.command, self.environment, output, scratch=folders.in_use)
        try:
            while not self._healthy():
                waited = time.monotonic() - started
                self.check("at start-up")
                if waited > self.timeout:
                    raise self._failed(f"was not ready after {self.timeout:.0f} s (--startup-timeout gives it longer)")
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
        """:raises ServerFailed: the server has ended."""
        code = None if self._process is None else self._process.exit_code()
        if self._process is None or code is not None:
            raise self._failed(f"ended with exit code {code} {when}".rstrip())

    def stop(self) -> None:
        """End every process that the server started. Nothing is left running when this returns.

        :raises StillRunning: some cannot be ended; the message names them.
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

    def _healthy(self) -> bool:
        # Asked twice a second, for minutes: plain HTTP to this machine, without the TLS context and the look for
        # proxies that an HTTP library begins with.
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)) as connection:
            try:
                connection.request("GET", "/health")
                return connection.getresponse().status == 200
            except (OSError, http.client.HTTPException):
                return False

    def _failed(self, what: str) -> ServerFailed:
        return ServerFailed(f"the {self.name} server {what}. {self.log_tail()}")


SAID_EVERY_S = 30.0
"""Seconds between two lines about how far something is, where there is no terminal."""


@contextmanager
def show_progress(console: Console, doing: str) -> Iterator[Callable[..., None]]:
    """Say within the block how far something is.

    :returns: takes the seconds since the start, a line, and what only a terminal shows beside it.
    """
    said = 0.0
    with console.status(doing, refresh_per_second=4) as status:

        def tell(seconds: float, line: str, more: str = "") -> None:
            nonlocal said
            status.update(line + more)
            if not console.is_terminal and seconds - said >= SAID_EVERY_S:
                said = seconds
                console.print(line, highlight=False)

        yield tell


@contextmanager
def show_starting(server: Server, console: Console, interrupt: Callable[[], None]) -> Iterator[None]:
    """Within the block, show how long the server has been starting, and the last line of its log.

    :param interrupt: called about twice a second; raises when it is time to end.
    """
    with show_progress(console, f"{server.name}: starting") as tell:

        def show(seconds: float, line: str) -> None:
            interrupt()
            tell(seconds, f"{server.name}: starting, {seconds:.0f} s", f"  [dim]{line[:100].replace('[', '(')}[/]")

        server.progress = show
        yield
