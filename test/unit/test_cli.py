"""Tests of the command line: its help, and its one-line errors and exit codes for bad input."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from sglang_moe_patches import __version__, cli, plugin
from sglang_moe_patches.cli import app
from sglang_moe_patches.core import patch
from sglang_moe_patches.lab import doctor, without_gpu
from sglang_moe_patches.lab.predict import config, engine_query
from sglang_moe_patches.lab.regress import regress
from sglang_moe_patches.lab.servers import refusals
from sglang_moe_patches.registry import CHANGES
from typer.testing import CliRunner

GOOD_LINE = json.dumps({"question": "1 + 1?", "answer": "2\n#### 2"})


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_the_version_option_prints_the_version():
    assert run("--version").stdout.strip() == __version__


def test_help_imports_neither_torch_nor_the_engine():
    code = (
        "import sys; sys.argv = ['x', '--help']\nfrom sglang_moe_patches import cli\n"
        "try:\n    cli.main()\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'sglang', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text(f"{GOOD_LINE}\n" * 5)
    return str(path)


def check_refusal(result, *words, code=2):
    """Check that a command printed only one line, on standard error, with these words, and exited with ``code``."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    for word in words:
        assert word in result.stderr


@pytest.fixture
def run_regress(tmp_path, model, data):
    """Return a function that runs ``regress`` with five questions. Its arguments are further options, and the server's
    arguments.

    ``TMP`` in the value of an option stands for a folder that contains a file named ``file``.
    """
    (tmp_path / "file").touch()

    def run_command(more=None, *server):
        options = {"--model": model, "--data-path": data, "--num-questions": "5", **(more or {})}
        given = [word.replace("TMP", str(tmp_path)) for pair in options.items() for word in pair]
        return run("regress", *given, *(["--", *server] if server else []))

    return run_command


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"--model": "TMP/nothing"}, ["TMP/nothing", "config.json"]),
        ({"--data-path": "TMP/nothing.jsonl"}, ["TMP/nothing.jsonl", "no such file", "test.jsonl"]),
        ({"--num-questions": "6"}, ["5 questions", "6"]),
        (
            {"--port": "1"},
            ["5 questions are too few to show", "by less than --max-drop 3", "at least 99", "--require-identical"],
        ),
        ({"--port": "1", "--max-drop": "2"}, ["ask at least 149"]),
        # If 40 % of the answers get lost, ten questions lose none with probability 0.6 ** 10, which is below 0.01.
        ({"--port": "1", "--max-drop": "40", "--alpha": "0.01"}, ["ask at least 10"]),
        # ``--output`` is checked before a server starts, not after both evaluations.
        ({"--output": "TMP/file"}, ["TMP/file is a file", "--output"]),
        ({"--output": "TMP/file/below"}, ["TMP/file is a file", "--output"]),
    ],
)
def test_a_bad_value_is_named(run_regress, tmp_path, more, words):
    check_refusal(run_regress(more), *(word.replace("TMP", str(tmp_path)) for word in words))


def test_a_folder_that_cannot_be_written_is_named_before_a_server_starts(run_regress, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    check_refusal(run_regress({"--output": "TMP/new"}), f"{tmp_path} cannot be written")


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[]",
        '{"question": "?"}',
        '{"question": "?", "answer": "no number"}',
        '{"question": "?", "answer": "7 #### seven"}',
        '{"question": 1, "answer": "#### 2"}',
    ],
)
def test_a_malformed_question_file_is_named_with_its_line(tmp_path, model, line):
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{GOOD_LINE}\n{line}\n")
    check_refusal(
        run("regress", "--model", model, "--data-path", str(path), "--num-questions", "2"), f"{path}:2", "####"
    )


def test_a_criterion_that_needs_too_many_questions_is_refused_before_a_server_starts(tmp_path, model):
    many = tmp_path / "many.jsonl"
    many.write_text(f"{GOOD_LINE}\n" * 1319)
    for source in (["--data-path", str(many)], []):
        base = ["regress", "--model", model, "--port", "1", *source]
        check_refusal(
            run(*base, "--max-drop", "1"),
            "--max-drop 1 at --alpha 0.05 needs 1,971 questions",
            "only 1,319 are available",
            "--num-questions",
        )
    assert regress.default_questions(many, regress.Criterion(False, 0.05)) == 282
    assert (
        regress.default_questions(many, regress.Criterion(True, 0.05, 1.0)) == 1319
    )  # all questions suffice, because identical answers are required


def test_a_machine_without_a_gpu_is_refused_in_one_line(run_regress, monkeypatch):
    monkeypatch.setattr(regress, "has_gpu", lambda: False)
    check_refusal(run_regress({"--max-drop": "90"}, "--tp", "2"), "no NVIDIA GPU", "--device")


def test_a_port_that_is_in_use_is_refused(run_regress):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        check_refusal(run_regress({"--port": port}), f"port {port} is in use")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ssl-keyfile", "key.pem"], ["--ssl-keyfile", "plain HTTP"]),
        (["--ssl-certfile=cert.pem"], ["--ssl-certfile", "leave the argument out"]),
        (["--enable-ssl-refresh"], ["plain HTTP"]),
        (["--tp", "2", "--nnodes", "2"], ["--nnodes", "this machine", "--baseline-url"]),
        (["--nnodes=4"], ["--nnodes"]),
        (["--use-ray"], ["--use-ray"]),
        (["--api-key", "secret"], ["--api-key", "127.0.0.1"]),
        (["--admin-api-key", "secret"], ["--admin-api-key"]),
        (["--is-embedding"], ["--is-embedding", "generated answers"]),
        (["--skip-tokenizer-init"], ["text"]),
        (["--disaggregation-mode", "prefill"], ["router", "--baseline-url"]),
        (["--disaggregation-mode=decode"], ["router"]),
        (["--grpc-mode"], ["HTTP"]),
        (["--checkpoint-engine-wait-weights-before-ready"], ["weights"]),
        (["--delete-ckpt-after-loading"], ["patched server"]),
        (["--config", "CONFIG"], ["--ssl-keyfile", "plain HTTP"]),
        (["--port", "30000"], ["--port", "before the `--`"]),
        (["--host=0.0.0.0"], ["--host", "127.0.0.1"]),
    ],
)
def test_server_arguments_that_regress_cannot_serve_are_refused_at_once(run_regress, tmp_path, arguments, words):
    (tmp_path / "server.yaml").write_text("tp: 2\nhost: 0.0.0.0\nssl_keyfile: key.pem\n")
    given = [str(tmp_path / "server.yaml") if argument == "CONFIG" else argument for argument in arguments]
    result = run_regress({"--port": "1"}, *given)
    check_refusal(result, *words)
    assert "secret" not in result.stderr


@pytest.mark.parametrize(
    "given", [["--nnodes", "1"], ["--disaggregation-mode", "null"], ["--tp", "4"], ["--config", "no"]]
)
def test_server_arguments_that_regress_can_serve_are_not_refused(given):
    refusals.check_server_arguments(given)


def test_a_setting_in_a_config_file_is_ignored_if_the_command_sets_it_itself(tmp_path):
    """``regress`` refuses some server arguments, also in the engine's ``--config`` file. An argument that ``regress``
    sets itself is allowed in the file, because the command line overrides the file."""
    file = tmp_path / "server.yaml"
    file.write_text("seed: 1\nport: 30000\n")
    given = ["--config", str(file)]
    refusals.check_server_arguments(given, {"--seed": refusals.Refusal("it is ours", "leave it out", ours=True)})
    with pytest.raises(ValueError, match="--port: it is not ours"):
        refusals.check_server_arguments(given, {"--port": refusals.Refusal("it is not ours", "leave it out")})


@pytest.mark.parametrize(
    "name",
    ["gpt2", "deepseek-ai/DeepSeek-V3", "s3://bucket/deep/model", "gs://bucket/model", "instance://10.0.0.1:8000"],
)
def test_a_model_name_that_is_no_path_is_left_to_the_engine(name):
    refusals.check_model(name)


@pytest.mark.parametrize("name", ["/no/where", "./model", "~/nowhere", "a/b/c", "no such name", ""])
def test_paths_without_a_model_are_refused(name):
    with pytest.raises(ValueError, match="no checkpoint found"):
        refusals.check_model(name)


QWEN = "Qwen/Qwen3-30B-A3B"
NOWHERE, ASKED = "http://127.0.0.1:9", ["regress", "--data-path", "DATA", "--num-questions", "5"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["doctor", "--", "--tp", "2"], ["SERVER_ARGS need --model"]),
        (["doctor", "--modle", "a/b"], ["no option --modle; did you mean --model?"]),
        (["doctor", "--model", "a/b", "--jsn"], ["no option --jsn; did you mean --json?"]),
        (["doctor", "--model", "a/b", "--gpus=h100"], ["did you mean --gpu?"]),
        (["doctor", "--model", ""], ["--model is empty"]),
        (["doctor", "--model", "a/b.gguf"], ["GGUF file", "config.json"]),
        (["doctor", "--model", QWEN, "--gpu", "h1000"], ["did you mean h100?", "h100:96GB"]),
        (["doctor", "--model", QWEN, "--gpu", "h100:0.1GB"], ["no GPU has 0.1 GB of memory"]),
        (["doctor", "--model", QWEN, "--", "--help"], ["--help is an option of the engine", "sglang.launch_server"]),
        (["regress"], ["-url"]),
        (["regress", "--baseline-url", NOWHERE], ["-url"]),
        (["regress", "--model", "x", "--baseline-url", "http://a:1", "--patched-url", "http://a:2"], ["-url"]),
        *(
            ([*ASKED, "--baseline-url", NOWHERE, "--patched-url", url], ["--patched-url", "http://HOST:PORT"])
            for url in ("http://host", "host:30000", "ftp://host:1", "http://host:port", "")
        ),
        (
            [*ASKED, "--max-drop", "60", "--baseline-url", NOWHERE, "--patched-url", NOWHERE],
            [NOWHERE, "no SGLang server answers"],
        ),
    ],
)
def test_missing_or_wrong_models_gpus_and_urls_are_refused(arguments, words, data):
    check_refusal(run(*(data if word == "DATA" else word for word in arguments)), *words)


@pytest.mark.parametrize(
    ("missing", "words"), [("architectures", "the class of the model"), ("model_type", "the kind of the configuration")]
)
def test_a_config_without_a_class_is_named_with_the_missing_key(missing, words, tmp_path):
    content, _ = config.load_model(QWEN)
    (tmp_path / "config.json").write_text(json.dumps({name: content[name] for name in content if name != missing}))
    check_refusal(run("doctor", "--model", str(tmp_path)), str(tmp_path), f"config.json has no {missing} ({words})")


def test_a_folder_of_gguf_files_is_named(tmp_path):
    (tmp_path / "model.gguf").touch()
    check_refusal(run("doctor", "--model", str(tmp_path)), "GGUF files and no config.json")


def test_a_refusal_is_json_for_programs():
    done = run("doctor", "--model", "", "--json")
    assert (done.exit_code, done.stderr) == (2, "")
    assert "--model is empty" in json.loads(done.stdout)["refused"]


def test_a_home_that_cannot_be_written_is_named_in_one_line(tmp_path, monkeypatch):
    """If ``doctor`` cannot write its cache folder, its error must name the folder in one line. In this test the
    folder's path is a file, because root could write into a read-only folder."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(without_gpu.machine, "has_gpu", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    check_refusal(run("doctor"), str(tmp_path / "file"), "cannot be written", "XDG_CACHE_HOME", code=1)


def test_a_gpu_without_a_model_has_no_effect_and_doctor_says_so(monkeypatch):
    monkeypatch.setattr(cli, "require_engine", lambda: cli.fail("the rest"))
    done = run("doctor", "--gpu", "h100")
    assert "--gpu has no effect without --model" in done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("SGLANG_PLUGINS", "somebody_else", "add moe_patches"),
        # The stock server ignores the variable and could answer for an hour before the patched server fails to start.
        ("SGLANG_MOE_PATCHES", "nonsense", "SGLANG_MOE_PATCHES: "),
    ],
)
def test_a_variable_with_which_no_patched_server_starts_is_refused(run_regress, monkeypatch, variable, value, said):
    monkeypatch.setenv(variable, value)
    check_refusal(run_regress(), said)


def test_an_unexpected_exception_ends_with_exit_code_2(model, data, monkeypatch, capsys):
    def unforeseen(*args, **kwargs):
        raise ZeroDivisionError("what is this")

    monkeypatch.setattr(regress, "check", unforeseen)
    given = ["regress", "--model", model, "--data-path", data, "--num-questions", "5"]
    monkeypatch.setattr(sys, "argv", ["sglang-moe-patches", *given])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "ZeroDivisionError: what is this" in capsys.readouterr().err


# --- Extras -----------------------------------------------------------------------------------------------------------

WITHOUT_EXTRAS = f"""
import sys
if "sglang_moe_patches.cli" in sys.orig_argv:  # not the engine's processes: they need some of these packages
    sys.modules.update(dict.fromkeys({cli.REGRESS_EXTRA}))
"""


def test_the_command_checks_for_every_package_of_the_extra_regress():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    brought = {re.split(r"[^\w-]", each)[0] for each in project["optional-dependencies"]["regress"]}
    assert set(cli.REGRESS_EXTRA) == brought


@pytest.fixture
def without_extras(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_EXTRAS)
    return str(tmp_path)


def test_a_missing_extra_is_named_with_the_command_that_installs_it(without_extras):
    done = command("regress", PYTHONPATH=without_extras)
    needs = "regress needs modules that are not installed (scipy, psutil, httpx, jinja2): pip install '.[regress]'"
    message = f"sglang-moe-patches: {needs} in a clone of sglang-moe-patches"
    assert (done.returncode, done.stderr.strip(), done.stdout) == (2, message, "")


def command(*arguments, **variables):
    paths = [variables.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
    return subprocess.run(
        [sys.executable, "-m", "sglang_moe_patches.cli", *arguments],
        env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_locale_without_unicode_only_replaces_letters_of_the_output():
    """In a locale without Unicode, the help must be printed in ASCII, without an error. The test sets the C locale, and
    disables Python's UTF-8 mode and locale coercion."""
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""}
    done = command("regress", "--help", **ascii_only)
    assert (done.returncode, done.stdout.isascii()) == (0, True), done.stderr


def install_fake_engine(folder: Path) -> str:
    """Install a distribution called sglang without a plugin framework, and return its folder."""
    for package in ("sglang", "sglang/srt"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").touch()
    info = folder / "sglang-0.5.10.post1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.10.post1\n")
    return str(folder)


def test_an_engine_without_the_plugin_framework_is_named(tmp_path):
    done = command("doctor", PYTHONPATH=install_fake_engine(tmp_path))
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "sglang-moe-patches: SGLang 0.5.10.post1 has no plugin framework (sglang.srt.plugins); "
        "install SGLang 0.5.11 or newer"
    )


def test_doctor_refuses_what_start_up_refuses_with_the_same_words(monkeypatch):
    monkeypatch.setenv("SGLANG_MOE_PATCHES_SEGMENTS", "1")
    with pytest.raises(SystemExit) as start:
        plugin.register()
    check_refusal(run("doctor"), str(start.value), "SGLANG_MOE_PATCHES_SEGMENTS: ")


def test_doctor_says_which_variables_are_in_force_and_which_nobody_reads(without_extras):
    """``doctor`` also lists variables that belong to no change, and variables that ``regress`` sets for its servers.

    ``doctor`` must not need the packages of the extra ``regress``.
    """
    ours = {variable.name: variable.default or "4096" for _, variable in patch.list_variables(CHANGES)}
    ours[patch.SELECT_VARIABLE] = "none"  # importing the engine takes seconds
    wrong = {"SGLANG_MOE_PATCHES_STRIKT": "1", "SGLANG_MOE_PATCH": "none"}
    done = command("doctor", PYTHONPATH=without_extras, **ours, **wrong)
    assert done.returncode == 0, done.stderr
    for name, value in ours.items():
        assert f"{name}={value}" in done.stdout
    hint = "is set, but no code reads it; did you mean"
    assert f"SGLANG_MOE_PATCHES_STRIKT {hint} SGLANG_MOE_PATCHES_STRICT?" in done.stdout
    assert f"SGLANG_MOE_PATCH {hint} SGLANG_MOE_PATCHES?" in done.stdout


def test_doctor_probes_the_selected_changes_alone_and_exits_with_1_if_one_is_unsupported(tmp_path):
    """In this test, ``doctor`` finds no module of the engine, so the selected change is unsupported.
    ``test_compatibility.py`` runs ``doctor`` on the unchanged engine."""
    sabotage = tmp_path / "sitecustomize.py"
    sabotage.write_text("from sglang_moe_patches.core import engine\nengine.has_module = lambda name: False\n")
    done = command("doctor", "--json", PYTHONPATH=str(tmp_path), SGLANG_MOE_PATCHES="output-buffer")
    facts = json.loads(done.stdout)
    found = {change["name"]: change for change in facts["changes"]}
    changed = found.pop("output-buffer")
    assert done.returncode == 1
    assert changed["status"] == "unsupported"
    assert changed["reason"].startswith("the engine has no sglang.srt.")
    assert {change["status"] for change in found.values()} == {"not selected"}
    assert facts["variables"]["SGLANG_MOE_PATCHES"] == "output-buffer"


IN_FORKS = """
import importlib, json, os, sys
from contextlib import suppress
from sglang_moe_patches.lab import doctor

for module in ("layers.moe.ep_moe.layer", "layers.quantization.modelopt_quant", "model_executor.model_runner"):
    with suppress(ImportError):
        importlib.import_module(f"sglang.srt.{module}")
for variables in json.loads(sys.argv[1]):
    if not os.fork():
        os.environ |= variables
        print(json.dumps(doctor._examine_here()), flush=True)
        os._exit(0)
    os.wait()
"""
"""Program that prints the facts that ``doctor`` finds with each set of environment variables. It reads each set in a
fork, so that the engine is imported only once."""


@pytest.mark.every_release
def test_doctor_says_what_a_server_of_this_environment_says():
    """``doctor`` reports two statuses of a change: the status on a server with these environment variables, and, under
    the key ``engine``, the status on this engine release, whatever the variables. If ``SGLANG_PLUGINS`` leaves out this
    package's plugin, only the first status must be *not selected*."""
    names = ["mori-input-truncation", "cutedsl-sizing"]
    here = ["not needed here", "as the engine has it"]
    expected = {"": here, "another": ["not selected", "not selected"], "another, moe_patches": here}
    selected = {"SGLANG_MOE_PATCHES": ",".join(names)}
    asked = json.dumps([selected | ({"SGLANG_PLUGINS": plugins} if plugins else {}) for plugins in expected])
    environ = os.environ | without_gpu.variables()
    done = subprocess.run([sys.executable, "-c", IN_FORKS, asked], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for (plugins, says), answer in zip(expected.items(), answers, strict=True):
        found = {change["name"]: change for change in answer["changes"]}
        in_engine = {name: found[name]["engine"]["status"] for name in names}
        assert "not selected" not in in_engine.values()
        says = [status if status != "as the engine has it" else in_engine["cutedsl-sizing"] for status in says]
        assert [found[name]["status"] for name in names] == says, plugins


def test_a_value_that_a_server_with_mori_refuses_is_named(monkeypatch):
    monkeypatch.setenv("SGLANG_MORI_MOE_MAX_INPUT_TOKENS", "abc")
    (line,) = doctor._describe_wrong_values()
    assert line.startswith("SGLANG_MORI_MOE_MAX_INPUT_TOKENS: ")
    assert line.endswith("a server in which mori-input-truncation applies does not start")


@pytest.mark.parametrize(
    ("text", "name", "memory"),
    [
        ("H100", "NVIDIA H100 80GB HBM3", 81_559 * 2**20),
        ("h100:94GB", "NVIDIA H100 80GB HBM3", 94 * 10**9),
        ("H20-3E", "NVIDIA H20-3e", 143_771 * 2**20),
        ("rtx pro 6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", 97_887 * 2**20),
        ("rtx-5090:24000MiB", "NVIDIA GeForce RTX 5090", 24_000 * 2**20),
        *((kind, engine_query.GPUS[kind].name, engine_query.GPUS[kind].memory) for kind in ("h800", "gb300", "l40s")),
    ],
)
def test_a_gpu_name_may_have_any_case_and_a_size_of_memory(text, name, memory):
    found = engine_query.find_gpu(text)
    assert (found.name, found.memory) == (name, memory)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mem_fraction_static": 88.0}, "--mem-fraction-static 88 is not a fraction"),
        ({"mem_fraction_static": 1.0}, "above 0 and below 1"),
        ({"mem_fraction_static": 0.0}, "above 0 and below 1"),
        ({"mem_fraction_static": 0.98}, ""),
        ({"tp_size": 0}, "--tp 0"),
        ({"max_running_requests": -1}, "--max-running-requests -1"),
        ({"chunked_prefill_size": 0}, "--chunked-prefill-size 0"),
        ({"chunked_prefill_size": -1}, ""),
        ({"chunked_prefill_size": 8192, "context_length": None}, ""),
        ({"context_length": 0}, "--context-length 0"),
        ({"cpu_offload_gb": -2}, "--cpu-offload-gb -2"),
    ],
)
def test_an_impossible_value_of_a_server_argument_is_refused_in_one_line(arguments, said):
    problem = engine_query.find_wrong_value(arguments)
    assert (said in problem) if said else problem == ""
    assert "\n" not in problem
