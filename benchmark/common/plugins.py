"""Engine plugins for one benchmark run: every process of a server executes their code when it starts."""

from __future__ import annotations

from pathlib import Path


def write(folder: Path, name: str, entry_point: str) -> Path:
    """Write the metadata of an installed plugin. The engine loads the plugin if ``folder`` is on ``PYTHONPATH``.

    :param name: name of the plugin and of its distribution.
    :param entry_point: ``module:function``. The server must be able to import the module.
    :returns: ``folder``.
    """
    info = folder / f"{name}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {entry_point}\n")
    return folder


def write_module(folder: Path, name: str, source: str) -> Path:
    """Write a plugin with its module. ``folder`` then contains all that the engine loads.

    :param name: name of the plugin, of its distribution and of its module.
    :param source: source of the module, which defines ``register()``.
    :returns: ``folder``.
    """
    write(folder, name, f"{name}:register")
    (folder / f"{name}.py").write_text(source)
    return folder
