"""Render an HTML page from a template, and replace the files of a report at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def render(template: Path, **values: Any) -> str:
    """Render a Jinja template with ``values``. Every value is escaped as HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # A model's answer may contain HTML, so every value is escaped.
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template.name).render(**values)


def replace(contents: Mapping[str, str], directory: Path) -> None:
    """Write several files at once. If one file cannot be written, all existing files stay as they are.

    :param contents: content of each file. The key is the file's name. An existing file of this name is replaced.
    :param directory: folder of the files. It is created if it does not exist.
    :raises OSError: the folder or a file cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    partial = {name: directory / f".{name}.{os.getpid()}.tmp" for name in contents}
    try:
        for name, content in contents.items():
            # A model can generate half a surrogate pair, and UTF-8 cannot encode it.
            partial[name].write_bytes(content.encode("utf-8", "backslashreplace"))
        for name, path in partial.items():
            os.replace(path, directory / name)
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)
