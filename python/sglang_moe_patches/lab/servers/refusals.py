"""Reject server arguments that ``regress`` does not support, before a server starts."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from sglang_moe_patches.core import engine
from sglang_moe_patches.core.machine import PLUGIN_NAME

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""Pattern for the name of a model on the Hugging Face hub."""


@dataclass(frozen=True)
class Refusal:
    """Reason why a command rejects a server argument.

    :param why: the reason, for the error message.
    :param instead: advice for the error message, such as another argument.
    :param applies: function that returns whether to reject a value of the argument. An argument without a value has the
        value "".
    :param ours: whether ``regress`` itself sets the argument on the server's command line. The argument is then allowed
        in a ``--config`` file, because the command line overrides the file.
    """

    why: str
    instead: str
    applies: Callable[[str], bool] = lambda value: True
    ours: bool = False


SERVE_YOURSELF = "start both servers yourself and give --baseline-url and --patched-url"
_OWN = Refusal(
    "regress sets this argument", "give --model and --port before the `--`; the servers listen on 127.0.0.1", ours=True
)
_HTTP = Refusal("regress uses plain HTTP on 127.0.0.1", "leave the argument out: it does not change the answers")
_KEY = Refusal(
    "regress sends no key", "leave the argument out: the servers listen only on 127.0.0.1 and only for this run"
)
_NO_ANSWERS = Refusal(
    "regress compares generated answers, and this server generates none", "serve a model that generates text"
)
_ELSEWHERE = "regress starts and ends processes only on this machine"
REFUSED_ARGUMENTS: dict[str, Refusal] = {
    **dict.fromkeys(("--host", "--port", "--model", "--model-path"), _OWN),
    **dict.fromkeys(
        ("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-keyfile-password", "--enable-ssl-refresh"), _HTTP
    ),
    **dict.fromkeys(("--grpc-mode", "--smg-grpc-mode"), _HTTP),
    **dict.fromkeys(("--api-key", "--admin-api-key"), _KEY),
    **dict.fromkeys(("--is-embedding", "--encoder-only"), _NO_ANSWERS),
    "--nnodes": Refusal(_ELSEWHERE, SERVE_YOURSELF, lambda n: n != "1"),
    "--use-ray": Refusal(_ELSEWHERE, SERVE_YOURSELF),
    "--disaggregation-mode": Refusal(
        "a prefill server or a decode server alone answers no request",
        "start a stock pair and a patched pair yourself, each with a router in front, and give the routers' URLs as "
        "--baseline-url and --patched-url",
        lambda mode: mode != "null",
    ),
    "--checkpoint-engine-wait-weights-before-ready": Refusal("regress sends no weights", SERVE_YOURSELF),
    "--delete-ckpt-after-loading": Refusal("the patched server needs the checkpoint, too", "leave the argument out"),
    "--skip-tokenizer-init": Refusal("the questions are text, not token ids", "leave the argument out"),
}
"""Server arguments that ``regress`` rejects. The key is the argument's name."""


def check_server_arguments(arguments: list[str], refused: Mapping[str, Refusal] = REFUSED_ARGUMENTS) -> None:
    """Check server arguments, also those in a ``--config`` file.

    :raises ValueError: an argument is rejected. The message says why and what to do instead.
    """
    for flag, value in [*_flag_values(arguments), *_from_config(arguments, refused)]:
        # The engine's parser accepts an unambiguous prefix of an argument's name.
        name = flag if flag in refused else next((name for name in refused if name.startswith(flag)), "")
        if name and flag != "--" and refused[name].applies(value):
            raise ValueError(f"{name}: {refused[name].why}; {refused[name].instead}")


def _flag_values(arguments: list[str]) -> Iterator[tuple[str, str]]:
    """Split arguments into (flag, value) pairs. A flag without a value has the value ``""``."""
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            yield flag, value if equals else ("" if following.startswith("--") else following)


def _from_config(arguments: list[str], refused: Mapping[str, Refusal]) -> Iterator[tuple[str, str]]:
    """Read the (flag, value) pairs that the engine takes from ``--config FILE``.

    Arguments that ``regress`` itself sets are left out, because the command line overrides the file.
    """
    for flag, value in _flag_values(arguments):
        if flag != "--config":
            continue
        try:
            settings = importlib.import_module("yaml").safe_load(Path(value).read_text(encoding="utf-8"))
        except Exception:  # the engine itself reports errors in the file
            continue
        for name, setting in settings.items() if isinstance(settings, dict) else ():
            config_flag = f"--{str(name).replace('_', '-')}"
            ours = config_flag in refused and refused[config_flag].ours
            if setting is not False and not ours:
                yield config_flag, str(setting)


def check_model(model: str) -> None:
    """Raise an error if the value of ``--model`` is neither a checkpoint, nor a name on the Hugging Face hub, nor an
    address such as ``s3://...``.

    :raises ValueError: ``model`` is none of these.
    """
    path = Path(model).expanduser()
    if path.exists():
        usable = path.is_file() or (path / "config.json").is_file()  # a GGUF checkpoint is a file
    else:
        usable = "://" in model or HUB_NAME.fullmatch(model) is not None
        usable &= not model.startswith(("/", ".", "~"))
    if not usable:
        raise ValueError(
            f"{model}: no checkpoint found (no config.json); --model takes a folder, a name on the Hugging Face hub, "
            "or an address that the engine can load from, such as s3://..."
        )


def check_plugins(environ: Mapping[str, str]) -> None:
    """Raise an error if the engine would not load this package as a plugin.

    :raises ValueError: ``SGLANG_PLUGINS`` leaves this package out.
    """
    if engine.is_plugin_left_out(environ):
        raise ValueError(
            f"SGLANG_PLUGINS={environ['SGLANG_PLUGINS']} keeps the engine from loading this package; add {PLUGIN_NAME}"
        )


def check_address(option: str, url: str) -> None:
    """Raise an error if ``url`` is not the address of a server.

    :raises ValueError: ``url`` is not an HTTP address with a host and a port.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"{option} {url} is not the address of a server: write http://HOST:PORT")


def check_output(folder: Path) -> None:
    """Raise an error if the folder of ``--output`` can neither be written nor created.

    :raises ValueError: the folder is a file, or it cannot be written.
    """
    existing = next((path for path in (folder, *folder.parents) if path.exists()), Path())
    if not existing.is_dir():
        raise ValueError(f"--output {folder}: {existing} is a file; name a folder for the report and the logs")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"--output {folder}: {existing} cannot be written; name another folder")
