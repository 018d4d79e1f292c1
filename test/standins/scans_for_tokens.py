"""Engine plugin that searches a scheduler's objects for the old KV cache size after the KV cache has grown.

It writes one line into the file ``SCAN`` for each attribute that still equals the old size in tokens. It also reports
attributes that equal the old size less 1 or less 6, because the engine derives the length of the longest request from
the size in this way.
"""

from __future__ import annotations

import collections
import functools
import os
import types
from pathlib import Path

import wrapt

PLAIN = (str, bytes, bytearray, float, type(None), types.ModuleType, types.CodeType, types.FrameType)


def register():
    if "SCAN" in os.environ:
        wrapt.register_post_import_hook(scan_when_serving, "sglang_moe_patches.memory.kv_sizing.start")


def scan_when_serving(start_module):
    serve = start_module.ServerStart._serve

    def serve_and_scan(start):
        serve(start)
        rule = start.pools.first.tokens
        paths = find_numbers({rule, rule - 1, rule - 6}, start.scheduler)
        Path(os.environ["SCAN"]).write_text("".join(f"{each}\n" for each in paths))

    start_module.ServerStart._serve = serve_and_scan


def list_members(value):
    """Yield the name and the value of each attribute, item, closure cell or argument of an object."""
    if isinstance(value, dict):
        yield from ((f"[{key!r:.40}]", member) for key, member in list(value.items())[:20_000])
    elif isinstance(value, list | tuple | set | frozenset | collections.deque):
        yield from ((f"[{place}]", member) for place, member in enumerate(list(value)[:5000]))
    elif isinstance(value, functools.partial):
        yield from ((".args", value.args), (".keywords", value.keywords), (".func", value.func))
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        yield from ((f".<{name}>", cell.cell_contents) for name, cell in cells if cell != types.CellType())
    elif not isinstance(value, type):
        yield from ((f".{name}", member) for name, member in list(getattr(value, "__dict__", {}).items()))
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name):
                    yield f".{name}", getattr(value, name)
        for name in getattr(type(value), "__struct_fields__", ()):
            if hasattr(value, name):
                yield f".{name}", getattr(value, name)


def find_numbers(numbers, scheduler):
    """Return the paths of all attributes of a scheduler, or of objects below it, that equal one of these numbers."""
    import torch

    paths, seen = [], {}
    queue = collections.deque([("scheduler", scheduler, 0)])
    while queue:
        path, value, depth = queue.popleft()
        if type(value) is int:
            if value in numbers and "sglang_moe_patches" not in path:
                paths.append(path)
            continue
        is_plugins = str(getattr(type(value), "__module__", "")).startswith("sglang_moe_patches")
        if isinstance(value, (*PLAIN, torch.Tensor)) or id(value) in seen or depth > 22 or is_plugins:
            continue
        seen[id(value)] = value
        try:
            queue.extend((path + name, each, depth + 1) for name, each in list_members(value))
        except Exception:  # an object of a library may raise any exception when its attributes are read
            continue
    return sorted(paths)
