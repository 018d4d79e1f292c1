"""Model and server arguments of the stock and the patched server that ``regress`` compares."""

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
    """Raised if another process listens on the port for the servers."""


@dataclass(frozen=True)
class ServerSpec:
    """Model and server arguments that the stock and the patched server share.

    :param model: path or name of the model.
    :param arguments: server arguments, without model, host and port.
    :param startup_timeout: seconds until a server must answer.
    :param port: port of both servers, which run one after the other; ``None`` to choose free ports.
    """

    model: str
    arguments: tuple[str, ...]
    startup_timeout: float = 1800
    port: int | None = None

    @property
    def server_arguments(self) -> list[str]:
        """Server arguments with the model, but without host and port."""
        path = Path(self.model).expanduser()
        return ["--model-path", str(path) if path.exists() else self.model, *self.arguments]

    @property
    def names_device(self) -> bool:
        """Whether the arguments may name a device: with ``--device``, or in the file of ``--config``."""
        return not {"--device", "--config"}.isdisjoint(argument.partition("=")[0] for argument in self.arguments)

    def check(self, environment: Mapping[str, str]) -> None:
        """Raise an error if an argument or an environment variable of the servers is wrong.

        :raises ValueError: an argument or variable is wrong. The message is one line that suggests a better value.
        """
        refusals.check_server_arguments(list(self.arguments))
        refusals.check_model(self.model)
        refusals.check_plugins(environment)
        patch.check_environment(CHANGES, environment)
        self._check_port()

    def _check_port(self) -> None:
        if self.port is not None and port_in_use(self.port):
            raise PortInUse(f"port {self.port} is in use; choose another --port, or leave it out for a free one")

    def server(self, name: str, environment: Mapping[str, str], log: Path) -> Server:
        """Create a server without starting it.

        :param name: ``STOCK`` or ``PATCHED``.
        :param environment: complete environment of the process. For the stock server, ``SGLANG_MOE_PATCHES=none`` is
            added.
        :param log: file for the server's output.
        :raises PortInUse: another process listens on the port.
        """
        self._check_port()
        selection = {patch.SELECT_VARIABLE: "none"} if name == STOCK else {}
        variables = {**environment, **selection}
        return Server(name, self.server_arguments, variables, log, timeout=self.startup_timeout, port=self.port)
