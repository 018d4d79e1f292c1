"""What is served: one model with its server arguments, stock or patched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_moe_patches.core import patch
from sglang_moe_patches.lab.servers import refusals
from sglang_moe_patches.lab.servers.server import Server, port_in_use
from sglang_moe_patches.registry import CHANGES

STOCK, PATCHED = "stock", "patched"


class PortInUse(ValueError):
    """Somebody listens where a server shall."""


@dataclass(frozen=True)
class ServerSpec:
    """A model to serve, on a stock and a patched server that are alike in all else.

    :param arguments: of the servers, without model, host and port.
    :param startup_timeout: seconds until a server must answer.
    :param port: of every server, one after the other; ``None`` for free ones.
    """

    model: str
    arguments: tuple[str, ...]
    startup_timeout: float = 1800
    port: int | None = None

    @property
    def given(self) -> list[str]:
        path = Path(self.model).expanduser()
        return ["--model-path", str(path) if path.exists() else self.model, *self.arguments]

    @property
    def names_device(self) -> bool:
        """Whether the arguments say what to run on, or lead to a file that may."""
        return not {"--device", "--config"}.isdisjoint(argument.partition("=")[0] for argument in self.arguments)

    def check(self, environment: Mapping[str, str]) -> None:
        """:raises ValueError: one line that names what is wrong and what to give instead."""
        refusals.check_server_arguments(list(self.arguments))
        refusals.check_model(self.model)
        refusals.check_plugins(environment)
        patch.check_environment(CHANGES, environment)
        self._check_port()

    def _check_port(self) -> None:
        if self.port is not None and port_in_use(self.port):
            raise PortInUse(f"port {self.port} is in use; choose another --port, or leave it out for a free one")

    def server(self, name: str, environment: Mapping[str, str], log: Path) -> Server:
        """``STOCK`` or ``PATCHED``, not started yet.

        :param environment: the whole environment of its process, but for what makes it stock.
        :raises PortInUse: it could not listen on its port.
        """
        self._check_port()
        own = {**environment, **({patch.SELECT_VARIABLE: "none"} if name == STOCK else {})}
        return Server(name, self.given, own, log, timeout=self.startup_timeout, port=self.port)
