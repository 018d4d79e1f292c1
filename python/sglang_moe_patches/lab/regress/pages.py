"""A page that is read in a browser, with nothing to load from elsewhere: its template, its files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def render(template: Path, **values: Any) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # Answers are whatever a model says: everything is escaped unless it is marked as ours.
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template.name).render(**values)


def replace(contents: Mapping[str, str], directory: Path) -> None:
    """Write files, each whole or not at all, and none before all could be written.

    :param contents: by file name; what is there already is replaced.
    :param directory: created if need be.
    :raises OSError: the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    partial = {name: directory / f".{name}.{os.getpid()}.tmp" for name in contents}
    try:
        for name, content in contents.items():
            # A model can say half a surrogate pair, which UTF-8 cannot.
            partial[name].write_bytes(content.encode("utf-8", "backslashreplace"))
        for name, path in partial.items():
            os.replace(path, directory / name)
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)
