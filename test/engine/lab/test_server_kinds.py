"""Tests of special kinds of servers, and of the end of servers. Each test starts its own server."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from pathlib import Path

import psutil
import pytest
from conftest import DEFAULT_ENGINE_ONLY
from servers import (
    EVALUATION,
    PATIENCE,
    REGRESS,
    ROUTED,
    SERVER,
    answers_in_process,
    ask_servers,
    check_patched,
    child_environment,
    make_server,
    prepend_to_path,
    read_observations,
    start_servers,
)
from sglang_moe_patches.lab.observers.forwards import workspace_bytes
from sglang_moe_patches.lab.servers.server import ServerFailed
from tiny_moe.mutations import plugin

pytestmark = pytest.mark.long("each test starts its own server")


@pytest.mark.ci
@DEFAULT_ENGINE_ONLY
def test_cutedsl_serves_a_prompt_beyond_the_budget_with_the_buffers_of_one_layer(engine, checkpoint, tmp_path):
    """The patched server answers a prompt that is longer than its prefill limits. All its layers together use less
    buffer memory than one stock layer.

    A stock server with these limits would end at the prompt of 300 tokens (test_reference_cutedsl.py). The expected
    answers therefore come from a stock engine in this process, with larger buffers.
    """
    limits = ["--chunked-prefill-size", "-1", "--max-prefill-tokens", "128"]
    path, backend = checkpoint(dense_layers=0), "flashinfer_cutedsl"
    with engine.override_arguments(moe_runner_backend=backend, chunked_prefill_size=2048, max_prefill_tokens=2048):
        stock = engine.load(path)
        expected = answers_in_process(engine, stock)
    layer_wrapper = stock.model.layers[0].mlp.experts._cutedsl_wrapper
    with start_servers(make_server("patched", path, tmp_path, *limits, backend=backend)) as (patched,):
        assert ask_servers(patched) == [expected]
    check_patched(read_observations(patched), moe_layers=4, backend=backend)
    # All layers together keep less than one stock layer, because the shared buffers have no output buffer.
    assert 0 < read_observations(patched).memory.kernel_buffer_bytes < workspace_bytes({layer_wrapper})
    assert patched.log_text().count("cutedsl-sizing: all layers share one set of buffers") == 1
    assert "runs in slices" not in patched.log_text()


# --- The end of servers ----------------------------------------------------------------------------------------------


def shared_memory_files(processes: list[psutil.Process]) -> set[Path]:
    """Return the shared memory files that processes map, by their inodes."""
    inodes = set()
    for process in processes:
        lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        # Compare inodes, because the creator of a semaphore maps it under an earlier name.
        inodes |= {int(line.split()[4]) for line in lines if " /dev/shm/" in line}
    return {path for path in Path("/dev/shm").iterdir() if path.stat().st_ino in inodes}


@pytest.mark.ci
@DEFAULT_ENGINE_ONLY
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.product)])
def test_an_interrupted_regress_leaves_no_process_and_no_file_of_its_servers(checkpoint, tmp_path, number):
    """After an interrupted ``regress``, its servers' processes have ended. Semaphores, the message queue of two ranks,
    sockets and temporary folders have been removed.

    Two tests do the same with a stand-in server: `test_two_signals_leave_no_process_and_no_report` and
    `test_a_killed_regress_leaves_no_server_file_and_keeps_logs_and_answers`.
    """
    output = tmp_path / "report"
    arguments = ["--model", str(checkpoint()), *EVALUATION, "--output", str(output), "--", "--tp", "2"]
    with tempfile.TemporaryDirectory(
        prefix="t"
    ) as temporary:  # outside tmp_path, because the path of a socket must be short
        process = subprocess.Popen(
            [*REGRESS, *arguments, *SERVER, ROUTED],
            env=child_environment(TMPDIR=temporary),
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert any(line.startswith("stock: ready") for line in process.stdout)
            family = psutil.Process(process.pid).children(recursive=True)
            shared, files = shared_memory_files(family), list(Path(temporary).glob("moe-*/*"))
            process.send_signal(number)
            process.communicate(timeout=PATIENCE)
            _, remaining = psutil.wait_procs(family, timeout=PATIENCE)
            assert remaining == []
        finally:
            process.kill()
        assert {path.name[:4] for path in shared} >= {"sem.", "psm_"}
        assert files
        assert [path for path in shared if path.exists()] == []
        # PyTorch's compiled kernels stay for the next server.
        assert [path.name for path in Path(temporary).iterdir() if not path.name.startswith("torchinductor_")] == []
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert output.exists() == (number == signal.SIGKILL)
    if output.exists():
        assert [path.name for path in output.iterdir()] == ["stock.log"]
        assert "The server is fired up" in (output / "stock.log").read_text()


ANOTHER_PLUGIN = """
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
HookRegistry.register(
    "sglang.srt.models.deepseek_v2.DeepseekV2DecoderLayer.forward",
    lambda original, *args, **kwargs: original(*args, **kwargs),
    HookType.AROUND,
)
"""


@pytest.mark.product
@DEFAULT_ENGINE_ONLY
def test_strict_mode_ends_the_start_if_another_plugin_wraps_the_same_function(checkpoint, tmp_path):
    path = prepend_to_path(plugin(tmp_path, ANOTHER_PLUGIN))
    strict = make_server("strict", checkpoint(), tmp_path, PYTHONPATH=path, SGLANG_MOE_PATCHES_STRICT="1")
    with pytest.raises(ServerFailed, match="SGLANG_MOE_PATCHES_STRICT=1 and a change cannot be applied"), strict:
        pass
    assert "deferred-shared-experts: unsupported, because" in strict.log_text()


@pytest.mark.product
@DEFAULT_ENGINE_ONLY
def test_an_unknown_change_ends_the_start(checkpoint, tmp_path):
    unknown = make_server("unknown", checkpoint(), tmp_path, SGLANG_MOE_PATCHES="output-bufer")
    with (
        pytest.raises(ServerFailed, match=r"(?s)exit code 1.*unknown change 'output-bufer'; valid: all, none"),
        unknown,
    ):
        pass
