"""A plugin of the engine for the servers of one run: code that every one of their processes runs at start-up."""

from __future__ import annotations

from pathlib import Path


def write(folder: Path, name: str, entry_point: str) -> Path:
    """Make a folder from which, on ``PYTHONPATH``, the engine loads an installed plugin.

    :param name: of the plugin and its distribution.
    :param entry_point: ``module:function``, the module importable in the server.
    :returns: the folder.
    """
    info = folder / f"{name}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {entry_point}\n")
    return folder


def write_module(folder: Path, name: str, source: str) -> Path:
    """The same with the module written into the folder: ``source`` defines ``register()``."""
    write(folder, name, f"{name}:register")
    (folder / f"{name}.py").write_text(source)
    return folder
