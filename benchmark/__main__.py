"""Run a benchmark, as in ``python benchmark changes/overhead --quick``. Without a name, list all benchmarks."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).parent
FOLDERS = ("changes", "memory", "whole", "tiny_moe")


def main() -> int:
    """Run the benchmark that the command line names.

    The benchmark is imported as a module, so that the benchmark and its child processes can import ``common``.
    """
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]
    names = {f"{path.parent.name}/{path.stem}": path for path in paths if "\ndef main(" in path.read_text()}
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in names:
        listed = "\n  ".join(names)
        print(
            "usage: python benchmark NAME [OPTION ...]\n\n"
            f"NAME is one of these. `python benchmark NAME --help` describes the benchmark.\n  {listed}",
            file=sys.stderr,
        )
        return 2
    sys.argv = [str(names[name]), *sys.argv[2:]]
    return importlib.import_module(name.replace("/", ".")).main() or 0


if __name__ == "__main__":
    sys.exit(main())
