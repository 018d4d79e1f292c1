"""Tests of the entry point that the engine calls in each process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from types import ModuleType

import pytest
from sglang_moe_patches import plugin
from sglang_moe_patches.registry import CHANGES


def python(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_MOE_PATCHES")}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_entry_point_is_found_by_its_group():
    found = [e.value for e in metadata.entry_points(group="sglang.srt.plugins") if e.name == "moe_patches"]
    assert found == ["sglang_moe_patches.plugin:register"]


def test_registering_imports_neither_torch_nor_the_engine():
    code = (
        "import sys; from sglang_moe_patches import plugin; plugin.register(); "
        "print([m for m in ('torch', 'sglang', 'flashinfer', 'rich', 'typer', 'scipy') if m in sys.modules])"
    )
    done = python(code)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "SGLANG_MOE_PATCHES",
            "output-bufer",
            "unknown change 'output-bufer'; valid: all, none, or a comma-separated list of output-buffer, ",
        ),
        (
            "SGLANG_MOE_PATCHES",
            "nvfp4-weights",
            "'nvfp4-weights'; nvfp4-weights is now fp4-weights; valid: ",
        ),
        (
            "SGLANG_MOE_PATCHES",
            " , ,",
            "SGLANG_MOE_PATCHES: ', ,' names no change; to select no change, set SGLANG_MOE_PATCHES=none",
        ),
        (
            "SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB",
            "4k",
            "SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB: expected a positive number",
        ),
        ("SGLANG_MOE_PATCHES_STRICT", "maybe", "SGLANG_MOE_PATCHES_STRICT: expected 0 or 1, got 'maybe'"),
    ],
)
def test_an_invalid_variable_ends_the_process_although_the_engine_swallows_exceptions(
    variable, value, message, monkeypatch
):
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as ended:  # the engine catches Exception, but not SystemExit
        plugin.register()
    assert message in str(ended.value)
    assert "\n" not in str(ended.value)


IN_FORKS = """
import json, os, sys
from sglang.srt import plugins

for missing in sys.argv[1:]:
    for strict in "01":
        sys.stdout.flush()
        if not os.fork():
            sys.modules[missing] = None
            os.environ["SGLANG_MOE_PATCHES_STRICT"] = strict
            said = "went on"
            try:
                plugins.load_plugins()
            except SystemExit as error:
                said = error.code
            print(json.dumps(said), flush=True)
            os._exit(0)
        os.wait()
"""
"""Program that loads the engine's plugins while one module is missing. It prints the result twice: without and with
``SGLANG_MOE_PATCHES_STRICT=1``. It tries each module in a fork, so that the engine is imported only once."""


@pytest.mark.every_release
def test_if_this_package_fails_to_import_a_strict_server_does_not_start():
    """If a module of this package or ``wrapt`` cannot be imported, a server with ``SGLANG_MOE_PATCHES_STRICT=1`` must
    not start. Without this variable, the server starts without changes."""
    missing = ["wrapt", "sglang_moe_patches.core.patch", "sglang_moe_patches.changes.output_buffer"]
    done = python(IN_FORKS, *missing)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert said[::2] == ["went on"] * len(missing), done.stderr
    for name, strict in zip(missing, said[1::2], strict=True):
        assert strict.startswith("sglang-moe-patches: SGLANG_MOE_PATCHES_STRICT=1, and no change can be applied: ")
        assert name.rpartition(".")[2] in strict
        assert "\n" not in strict


def test_a_failed_registration_ends_only_a_strict_process(monkeypatch):
    monkeypatch.setattr(plugin.wrapt, "register_post_import_hook", lambda hook, name: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        plugin.register()
    monkeypatch.setenv("SGLANG_MOE_PATCHES_STRICT", "1")
    with pytest.raises(SystemExit, match="no change can be applied: ZeroDivisionError"):
        plugin.register()


@pytest.mark.parametrize("has_file", [True, False])
def test_an_engine_without_a_model_runner_is_named(has_file, tmp_path):
    package = tmp_path / "sglang" / "srt" / "model_executor"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    if has_file:
        (package / "model_runner.py").touch()
    imports = "import sglang.srt.model_executor.model_runner; " if has_file else ""
    code = f"from sglang_moe_patches import plugin; plugin.register(); {imports}print('went on')"
    lenient = python(code, PYTHONPATH=str(tmp_path))
    assert (lenient.returncode, lenient.stdout) == (0, "went on\n")
    words = "has no ModelRunner" if has_file else "the engine has no sglang.srt.model_executor.model_runner"
    assert words in lenient.stderr
    strict = python(code, PYTHONPATH=str(tmp_path), SGLANG_MOE_PATCHES_STRICT="1")
    assert (strict.returncode, strict.stdout) == (1, "")
    assert words in strict.stderr


HOOKS = [(change.name, *hook) for change in CHANGES for hook in change.launcher_hooks]


@pytest.mark.parametrize(("name", "module", "hook"), HOOKS, ids=[f"{name} {module}" for name, module, _ in HOOKS])
def test_a_module_without_the_hook_point_of_a_launcher_hook_is_imported_unpatched(name, module, hook, caplog):
    plugin._run_launcher_hook(name, hook, ModuleType(module))
    assert f"patching {module} (change {name}) failed and is skipped" in caplog.text


def test_a_failed_launcher_hook_is_undone(caplog):
    module = ModuleType("of_the_engine")

    def hook(module, patcher):
        patcher.add(module, "added", 1)
        patcher.replace(module, "missing", 2)

    plugin._run_launcher_hook("a change", hook, module)
    assert not hasattr(module, "added")
    assert "AttributeError" in caplog.text


def test_an_unread_variable_is_one_warning_at_start_up():
    code = "import logging; logging.basicConfig(); from sglang_moe_patches import plugin; plugin.activate()"
    done = python(code, SGLANG_MOE_PATCHES="none", SGLANG_MOE_PATCHES_STRIKT="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("SGLANG_MOE_PATCHES_STRIKT is set, but no code reads it") == 1
    assert done.stderr.startswith("WARNING")
