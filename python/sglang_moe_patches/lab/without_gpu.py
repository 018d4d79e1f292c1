"""Environment variables with which the engine can be imported on a machine without a GPU.

Without a CUDA driver the engine's compiled kernels cannot be imported. A stub ``libcuda.so.1``, whose functions all
return "no device", makes the import possible. ``doctor`` can then ask the engine on any machine, and tests can run the
engine on the CPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Mapping
from importlib import util
from pathlib import Path

from sglang_moe_patches.core import machine


class UnusableEnvironment(RuntimeError):
    """Raised if the engine cannot be imported on this machine. The message says what is missing."""


def variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables that a new process needs to import the engine without a GPU. The result is empty
    on a machine with a GPU.

    :raises UnusableEnvironment: a C compiler, the engine's kernels, or a library that the kernels load is missing.
    """
    if machine.has_gpu():
        return {}
    stub = build_stub_libcuda(machine.find_cache_folder(environ))
    paths = [str(stub.parent), *filter(None, environ.get("LD_LIBRARY_PATH", "").split(":"))]
    return {
        "LD_LIBRARY_PATH": ":".join(dict.fromkeys(paths)),
        "SGLANG_USE_CPU_ENGINE": "1",
    }


def build_stub_libcuda(folder: Path) -> Path:
    """Build a stub ``libcuda.so.1``, unless it already exists.

    The library defines only the ``cu*`` functions that the engine's compiled kernels import. All of them return 100
    (``CUDA_ERROR_NO_DEVICE``).

    :returns: path of the library, in its own folder below ``folder``.
    :raises UnusableEnvironment: the library cannot be built, or another library that the kernels load is missing.
    """
    if not (libraries := _libraries("sgl_kernel")):
        raise UnusableEnvironment("the engine's kernels (sgl_kernel) are not installed in this environment")
    libraries += _libraries("deep_gemm")  # some releases look up the driver's functions at import
    undefined = {name for library in libraries for name in _undefined_symbols(library)}
    # The kernels load libnuma, which no Python package contains and which some systems lack.
    if any(name.startswith("numa_") for name in undefined) and not _can_load("libnuma.so.1"):
        raise UnusableEnvironment(
            "the engine's kernels (sgl_kernel) need libnuma.so.1, which cannot be loaded; install libnuma1 (Debian, "
            "Ubuntu) or numactl-libs"
        )
    # The driver's functions are named cuXxx, unlike those of the CUDA runtime (cudaXxx) and of cuBLAS (cublasXxx).
    symbols = sorted(name for name in undefined if name.startswith("cu") and name[2:3].isupper())
    source = "".join(f"int {name}(void) {{ return 100; }}\n" for name in symbols)
    target = folder / f"libcuda-{hashlib.sha256(source.encode()).hexdigest()[:16]}" / "libcuda.so.1"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnusableEnvironment(
            f"{target.parent} cannot be written ({error.strerror}): set XDG_CACHE_HOME to a folder that can be written"
        ) from None
    partial = target.with_suffix(f".{os.getpid()}")
    _run(
        ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(partial), "-Wl,-soname,libcuda.so.1"],
        "building a stub CUDA driver",
        text=source,
    )
    partial.replace(target)  # replace the file atomically, because several servers may build the library at once
    return target


def _libraries(package: str) -> list[Path]:
    spec = util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return []
    return sorted(Path(spec.submodule_search_locations[0]).rglob("*.so"))


def _undefined_symbols(library: Path) -> set[str]:
    listing = _run(["nm", "-D", "--undefined-only", str(library)], "reading the engine's kernels")
    return {line.split()[-1].split("@")[0] for line in listing.splitlines() if line.strip()}


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _run(command: list[str], purpose: str, text: str | None = None) -> str:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UnusableEnvironment(
            f"{purpose} needs {command[0]}, which is not installed; install gcc and binutils"
        ) from None
    if done.returncode:
        raise UnusableEnvironment(f"{purpose} failed: {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
