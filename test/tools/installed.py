"""Check an installed sglang-moe-patches: its plugin entry point, its command and its data files.

    build/wheel/environment/bin/python -I test/tools/installed.py  # make wheel

The script needs only the package and its dependencies.
"""

from __future__ import annotations

import sys
from importlib import metadata, resources

PACKAGE = "sglang_moe_patches"
DISTRIBUTION = "sglang-moe-patches"
GROUP, PLUGIN = "sglang.srt.plugins", "moe_patches"
"""Group and name of the entry point by which the engine finds the plugin."""
DATA = ("py.typed", "lab/regress/report.html.j2", "lab/predict/models.json")


def problems() -> list[str]:
    """Return the faults of the installation, one line per fault. Without faults, the engine finds the plugin."""
    found = [point for point in metadata.entry_points(group=GROUP) if point.name == PLUGIN]
    if [point.value for point in found] != [f"{PACKAGE}.plugin:register"]:
        return [f"entry point {PLUGIN} of {GROUP}: expected {PACKAGE}.plugin:register, found {found}"]
    faults = [] if callable(found[0].load()) else [f"{found[0].value} is not a function"]
    faults += [f"{name} is not installed" for name in DATA if not resources.files(PACKAGE).joinpath(name).is_file()]
    commands = {point.name for point in metadata.entry_points(group="console_scripts")}
    return faults + ([] if DISTRIBUTION in commands else [f"the command {DISTRIBUTION} is not installed"])


if __name__ == "__main__":
    if faults := problems():
        sys.exit("\n".join(faults))
    print(f"{DISTRIBUTION} {metadata.version(DISTRIBUTION)}: the engine finds its plugin")
