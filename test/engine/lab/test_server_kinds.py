"""Servers of further kinds, and how servers end: each test starts its own."""

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
    answers,
    answers_in_process,
    check_patched,
    child_environment,
    figures,
    on_path,
    server,
    started,
)
from sglang_moe_patches.lab.observers.forwards import workspace_bytes
from sglang_moe_patches.lab.servers.server import ServerFailed
from tiny_moe.mutations import plugin

pytestmark = pytest.mark.long("each starts a server of a kind of its own")


@pytest.mark.ci
@DEFAULT_ENGINE_ONLY
def test_cutedsl_serves_a_prompt_beyond_the_budget_from_buffers_of_one_layer(engine, checkpoint, tmp_path):
    """With these limits the stock engine ends on the prompt of 300 tokens (test_reference_cutedsl.py). Here it answers
    in this process, with buffers by which no prompt is cut."""
    limits = ["--chunked-prefill-size", "-1", "--max-prefill-tokens", "128"]
    path, backend = checkpoint(dense_layers=0), "flashinfer_cutedsl"
    with engine.arguments(moe_runner_backend=backend, chunked_prefill_size=2048, max_prefill_tokens=2048):
        stock = engine.load(path)
        expected = answers_in_process(engine, stock)
    of_a_layer = stock.model.layers[0].mlp.experts._cutedsl_wrapper
    with started(server("patched", path, tmp_path, *limits, backend=backend)) as (patched,):
        assert answers(patched) == [expected]
    check_patched(figures(patched), moe_layers=4, backend=backend)
    # For four times the tokens, and less than one layer's: the output is none of the buffers.
    assert 0 < figures(patched).memory.kernel_buffer_bytes < workspace_bytes({of_a_layer})
    assert patched.log_text().count("cutedsl-sizing: one set of buffers") == 1
    assert "runs in slices" not in patched.log_text()


# --- Ends ------------------------------------------------------------------------------------------------------------


def shared_by(processes: list[psutil.Process]) -> set[Path]:
    """Files in shared memory that these processes have."""
    inodes = set()
    for process in processes:
        lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        # By number: who made a semaphore has it under a name of before.
        inodes |= {int(line.split()[4]) for line in lines if " /dev/shm/" in line}
    return {path for path in Path("/dev/shm").iterdir() if path.stat().st_ino in inodes}


@pytest.mark.ci
@DEFAULT_ENGINE_ONLY
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.product)])
def test_an_end_leaves_no_process_and_nothing_in_shared_memory_nor_of_temporary_files(checkpoint, tmp_path, number):
    """Semaphores, the message queue of two ranks, sockets; and our folders where the command is killed.

    Of a server that stands in: `test_two_signals_leave_no_process_and_no_report` and
    `test_a_killed_regress_leaves_no_file_and_loses_none`.
    """
    output = tmp_path / "report"
    arguments = ["--model", str(checkpoint()), *EVALUATION, "--output", str(output), "--", "--tp", "2"]
    with tempfile.TemporaryDirectory(prefix="t") as temporary:  # not in tmp_path: sockets have short paths
        process = subprocess.Popen(
            [*REGRESS, *arguments, *SERVER, ROUTED],
            env=child_environment(TMPDIR=temporary),
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert any(line.startswith("stock: ready") for line in process.stdout)
            family = psutil.Process(process.pid).children(recursive=True)
            shared, files = shared_by(family), list(Path(temporary).glob("moe-*/*"))
            process.send_signal(number)
            process.communicate(timeout=PATIENCE)
            _, left = psutil.wait_procs(family, timeout=PATIENCE)
            assert left == []
        finally:
            process.kill()
        assert {path.name[:4] for path in shared} >= {"sem.", "psm_"}
        assert files
        assert [path for path in shared if path.exists()] == []
        # PyTorch's compiled kernels are for the next server.
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
def test_strict_ends_the_start_up_beside_a_plugin_that_has_wrapped_a_seam(checkpoint, tmp_path):
    path = on_path(plugin(tmp_path, ANOTHER_PLUGIN))
    strict = server("strict", checkpoint(), tmp_path, PYTHONPATH=path, SGLANG_MOE_PATCHES_STRICT="1")
    with pytest.raises(ServerFailed, match="SGLANG_MOE_PATCHES_STRICT=1 and a change cannot be applied"), strict:
        pass
    assert "deferred-shared-experts: unsupported, because" in strict.log_text()


@pytest.mark.product
@DEFAULT_ENGINE_ONLY
def test_an_unknown_change_ends_the_start_up(checkpoint, tmp_path):
    unknown = server("unknown", checkpoint(), tmp_path, SGLANG_MOE_PATCHES="output-bufer")
    with (
        pytest.raises(ServerFailed, match=r"(?s)exit code 1.*unknown change 'output-bufer'; valid: all, none"),
        unknown,
    ):
        pass
