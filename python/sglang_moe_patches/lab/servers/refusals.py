"""What a command is given, and why it cannot serve it: found out before a server is started."""

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


@dataclass(frozen=True)
class Refusal:
    """A server argument that a command cannot serve.

    :param applies: whether it is refused, from its value ("" for none).
    :param ours: the command gives it on the command line, which wins over what ``--config`` says.
    """

    why: str
    instead: str
    applies: Callable[[str], bool] = lambda value: True
    ours: bool = False


SERVE_YOURSELF = "start both servers yourself and give --baseline-url and --patched-url"
_OWN = Refusal("regress sets it", "give --model and --port before the `--`; the servers listen on 127.0.0.1", ours=True)
_HTTP = Refusal("the servers listen on 127.0.0.1 and are asked over plain HTTP", "leave it out: answers are the same")
_KEY = Refusal("no key is sent", "leave it out: the servers listen on 127.0.0.1 for this run alone")
_NO_ANSWERS = Refusal("regress asks for generated answers, and this server gives none", "serve a model that generates")
_ELSEWHERE = "regress starts, watches and ends processes on this machine only"
REFUSED: dict[str, Refusal] = {
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
        "one half of a pair answers nothing by itself",
        f"put a router before each pair, {SERVE_YOURSELF}",
        lambda mode: mode != "null",
    ),
    "--checkpoint-engine-wait-weights-before-ready": Refusal("nobody would send the weights", SERVE_YOURSELF),
    "--delete-ckpt-after-loading": Refusal("the second server needs the checkpoint, too", "leave it out"),
    "--skip-tokenizer-init": Refusal("the questions are text", "leave it out"),
}
"""Server arguments that ``regress`` cannot serve, by name."""


def check_server_arguments(arguments: list[str], refused: Mapping[str, Refusal] = REFUSED) -> None:
    """:raises ValueError: one of them cannot be served; the message says why and what to do instead."""
    for flag, value in [*_pairs(arguments), *_from_config(arguments, refused)]:
        # The engine's parser takes the beginning of a name for it, where no other name begins so.
        name = flag if flag in refused else next((name for name in refused if name.startswith(flag)), "")
        if name and flag != "--" and refused[name].applies(value):
            raise ValueError(f"{name}: {refused[name].why}; {refused[name].instead}")


def _pairs(arguments: list[str]) -> Iterator[tuple[str, str]]:
    """(flag, the value that follows it, or "")."""
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            yield flag, value if equals else ("" if following.startswith("--") else following)


def _from_config(arguments: list[str], refused: Mapping[str, Refusal]) -> Iterator[tuple[str, str]]:
    """What the engine reads from ``--config FILE``; what is given on the command line, as ours is, wins over it."""
    for flag, value in _pairs(arguments):
        if flag != "--config":
            continue
        try:
            settings = importlib.import_module("yaml").safe_load(Path(value).read_text(encoding="utf-8"))
        except Exception:  # the engine says what is wrong with the file
            continue
        for name, setting in settings.items() if isinstance(settings, dict) else ():
            given = f"--{str(name).replace('_', '-')}"
            ours = given in refused and refused[given].ours
            if setting is not False and not ours:
                yield given, str(setting)


def check_model(model: str) -> None:
    """:raises ValueError: ``model`` is a path, and no checkpoint is there."""
    path = Path(model).expanduser()
    if path.exists():
        usable = path.is_file() or (path / "config.json").is_file()  # a file: GGUF
    else:
        usable = "://" in model or HUB_NAME.fullmatch(model) is not None
        usable &= not model.startswith(("/", ".", "~"))
    if not usable:
        raise ValueError(
            f"{model}: no model there (no config.json); --model takes a folder, a name on the hub, or an address "
            "that the engine can load from, such as s3://..."
        )


def check_plugins(environ: Mapping[str, str]) -> None:
    """:raises ValueError: the engine would not load this package."""
    if engine.is_plugin_left_out(environ):
        raise ValueError(
            f"SGLANG_PLUGINS={environ['SGLANG_PLUGINS']} keeps the engine from loading this package; add {PLUGIN_NAME}"
        )


def check_address(option: str, url: str) -> None:
    """:raises ValueError: ``url`` is not an HTTP address with a host and a port."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"{option} {url}: give it as http://HOST:PORT")


def check_output(folder: Path) -> None:
    """:raises ValueError: ``folder`` is no folder, or cannot be written."""
    there = next((each for each in (folder, *folder.parents) if each.exists()), Path())
    if not there.is_dir():
        raise ValueError(f"--output {folder}: {there} is a file; give a folder for the report and the logs")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"--output {folder}: {there} cannot be written; give another folder")
