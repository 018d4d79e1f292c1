"""Hardware and software versions of the machine on which a benchmark runs."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any


def conditions() -> dict[str, Any]:
    """Describe the machine for a result. This does not import the engine."""
    import torch

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    known: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": hardware(),
        "commit": commit(),
        "engine": version("sglang"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "flashinfer": version("flashinfer-python"),
        "cpus": len(_cpus()),
    }
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        known |= {
            "gpu": gpu.name,
            "gpus": torch.cuda.device_count(),
            "gpu_bytes": gpu.total_memory,
            "capability": [gpu.major, gpu.minor],
            "l2_bytes": gpu.L2_cache_size,
            "cuda": torch.version.cuda or torch.version.hip,
            "driver": _driver(),
        }
    return known


def commit() -> str | None:
    """Return the commit of this repository, from the variable ``BENCHMARK_COMMIT`` or else from git; ``None``: both are
    missing.

    A machine that received a copy of the files has no git history. The person who copies the files sets the variable
    there.
    """
    if named := os.environ.get("BENCHMARK_COMMIT"):
        return named
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    return _first_line(command)


def hardware() -> str:
    """Return the number and name of the GPUs, or the name of the CPU on a machine without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return f"{platform.processor() or platform.machine()} CPU"
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"


def gpu_model(conditions: dict[str, Any]) -> str:
    """Return the short name of the GPU model: ``H100`` for ``NVIDIA H100 80GB HBM3``. Without a GPU, return "".

    :param conditions: :func:`conditions` of a result.
    """
    return (conditions.get("gpu") or "").removeprefix("NVIDIA ").partition(" ")[0]


def format_conditions(conditions: dict[str, Any]) -> str:
    """Format a result's conditions as a line above its table."""
    names = (("engine", "SGLang"), ("torch", "PyTorch"), ("triton", "Triton"))
    parts = [f"{label} {conditions[key]}" for key, label in names if conditions.get(key)]
    return ", ".join([conditions["machine"], *parts, conditions["date"]])


def require_gpu(name: str, instead: str = "") -> None:
    """End the program with a message if PyTorch sees no GPU.

    :param name: name of the benchmark.
    :param instead: advice about what to run without a GPU.
    """
    import torch

    if not torch.cuda.is_available():
        print(f"{name}: needs a GPU, and PyTorch sees none here" + (f"; {instead}" if instead else ""), file=sys.stderr)
        raise SystemExit(2)


def _cpus() -> set[int] | range:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _driver() -> str | None:
    return _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])


def _first_line(command: list[str]) -> str | None:
    """Return the first line that a command prints; ``None``: the command fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.split("\n")[0].strip()
