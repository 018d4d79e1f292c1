"""Tests of the command ``sglang-moe-reference`` and of its plugin, which run the engine on slow reference kernels
without a GPU. They are test tools, and the product must use neither."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from releases import ROOT
from sglang_moe_patches.core import machine
from sglang_moe_reference import cli, environment
from sglang_moe_reference.model import tokenizer_json
from typer.testing import CliRunner


def invoke(*arguments):
    return CliRunner().invoke(cli.app, list(arguments))


def run_command(*arguments, **variables):
    return subprocess.run(
        [sys.executable, "-m", "sglang_moe_reference.cli", *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def assert_refused(result, *words):
    assert (result.exit_code, result.stdout, len(result.stderr.strip().splitlines())) == (2, "", 1), result.output
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize(
    ("option", "value"), [("--hidden", "100"), ("--top-k", "9"), ("--dense-layers", "5"), ("--family", "gpt")]
)
def test_make_model_names_the_bad_value(tmp_path, option, value):
    assert_refused(invoke("make-model", str(tmp_path / "m"), option, value), "make-model")
    assert not (tmp_path / "m").exists()


def test_make_model_writes_a_model_of_the_named_family(tmp_path):
    options = ["--family", "qwen3-moe", "--layers", "1", "--experts", "2", "--bf16"]
    assert invoke("make-model", str(tmp_path / "m"), *options).exit_code == 0
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert "quantization_config" not in config


def test_make_model_does_not_overwrite_other_files(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    assert_refused(invoke("make-model", str(tmp_path)), str(tmp_path))
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_locale_without_unicode_changes_no_file(tmp_path):
    """``make-model`` must write its files in UTF-8, whatever the locale. The test sets the C locale, and disables
    Python's UTF-8 mode and locale coercion."""
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""}
    done = run_command("make-model", str(tmp_path / "m"), "--layers", "1", "--dense-layers", "1", **ascii_only)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "m" / "tokenizer.json").read_text(encoding="utf-8") == tokenizer_json()


def test_exec_runs_the_command_with_the_variable_and_returns_its_exit_code():
    code = f"import os, sys; print(sys.argv[1:], os.environ['{environment.SWITCH}']); sys.exit(7)"
    done = run_command("exec", "--", sys.executable, "-c", code, "--flag", "-x")
    assert (done.returncode, done.stdout.strip()) == (7, "['--flag', '-x'] 1"), done.stderr


def test_exec_refuses_a_plugin_list_without_its_own_plugin():
    done = run_command("exec", "--", "true", SGLANG_PLUGINS=machine.PLUGIN_NAME)
    assert done.returncode == 2
    assert f"add {environment.PLUGIN_NAME}" in done.stderr


def test_exec_names_a_missing_command():
    done = run_command("exec", "--", "no-such-command-here")
    message = "sglang-moe-reference: no such command: no-such-command-here"
    assert (done.returncode, done.stderr.strip()) == (127, message)


def test_regress_compares_servers_on_the_reference_kernels(tmp_path, monkeypatch):
    """The command passes the options on to ``regress``, and adds the server arguments that the engine needs without a
    GPU."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(environment.without_gpu, "build_stub_libcuda", lambda folder: Path("/stub/libcuda.so.1"))

    def compare(subject, evaluation, criterion, **others):
        seen.update(subject=subject, criterion=criterion, **others)
        raise KeyboardInterrupt

    monkeypatch.setattr("sglang_moe_patches.lab.regress.regress.run", compare)
    options = ["--model", str(tmp_path), "--num-questions", "5", "--require-identical"]
    assert invoke("regress", *options, "--", "--tp", "2").exit_code == 130
    assert seen["subject"].arguments[:2] == ("--tp", "2")
    assert "--device cpu" in " ".join(seen["subject"].arguments)
    assert seen["criterion"].require_identical
    assert seen["environment"][environment.SWITCH] == "1"
    assert seen["environment"]["LD_LIBRARY_PATH"].startswith("/stub")


@pytest.mark.parametrize(("value", "installs"), [("1", True), ("0", False), ("", False)])
def test_nothing_is_replaced_unless_the_variable_is_set(monkeypatch, value, installs):
    done = []
    monkeypatch.setattr(environment, "install", lambda: done.append(1))
    monkeypatch.setenv(environment.SWITCH, value)
    (plugin,) = metadata.entry_points(group="sglang.srt.plugins", name=environment.PLUGIN_NAME)
    plugin.load()()
    assert bool(done) == installs


@pytest.mark.parametrize("variable", [environment.KERNELS, environment.WORKSPACE_MB])
def test_an_invalid_value_ends_the_start(monkeypatch, variable):
    """If a variable has an invalid value, the plugin raises ``SystemExit``. The engine would log an ``Exception`` and
    start nevertheless."""
    monkeypatch.setenv(variable.name, "yes")
    with pytest.raises(SystemExit, match=f"{variable.name}: expected"):
        environment.register()


def test_no_file_of_the_product_names_the_reference_kernels():
    """The product's files must not mention the reference kernels. Otherwise a variable could make a user's server run
    on them."""
    files = [path for path in (ROOT / "python").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    naming = [path for path in files if b"moe_reference" in path.read_bytes().lower().replace(b"-", b"_")]
    assert len(files) > 50
    assert naming == []
    product = metadata.distribution("sglang-moe-patches")
    assert {point.name for point in product.entry_points} == {"sglang-moe-patches", machine.PLUGIN_NAME}
