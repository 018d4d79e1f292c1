"""Tests of kv-sizing in real servers on the CPU. A stand-in replaces the GPU's driver. Everything else is the engine's
own code. The KV cache lies over reserved addresses, of which only a part has memory. Code that touches an address
without memory ends the server."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import httpx
import image_model
import psutil
import pytest
import unsized_servers
from common import dummy_models, dummy_weights, plugins
from conftest import DEFAULT_ENGINE_ONLY, RELEASE
from releases import ALL, DEFAULT, ROOT
from servers import (
    PATIENCE,
    ROUTED,
    Server,
    answers_in_process,
    ask_servers,
    make_server,
    prepend_to_path,
    start_servers,
)
from sglang_moe_patches.core import engine as engine_code
from sglang_moe_patches.lab.servers.server import ServerFailed, free_port
from sglang_moe_patches.memory.kv_sizing import (
    eligibility,
    engine_objects,
    engine_rule,
    phases,
    pools,
    rehearsal,
    serving,
)

PLUGINS = ("tells_memory", "has_pools", "scans_for_tokens")
STAND_INS = {name: (ROOT / f"test/standins/{name}.py").read_text() for name in (*PLUGINS, "gathers_on_cpu")}
MARGIN = str(eligibility.LEAST_MARGIN)
SMALL = ["--chunked-prefill-size", "64", "--max-running-requests", "3", "--context-length", "320"]
PROMPTS = [[7, 8, 9], list(range(3, 203))]
POOL_MODULES = dict.fromkeys(("HybridLinearKVPool", "HybridReqToTokenPool", "MambaPool"), "memory_pool")
POOL_MODULES["SWAKVPool"] = "swa_memory_pool"
LOG_PREFIX = "sglang-moe-patches: kv-sizing: "


FLUSHED_CACHE_ARGUMENTS = {
    *("enable_dp_attention", "enable_kv_cache_events", "enable_metrics", "enable_session_radix_cache"),
    "enable_streaming_session",
}
"""Server arguments that the engine reads when it chooses a prefix cache. None of them selects an external store of
prompts, so a flush always empties the prefix cache. kv-sizing therefore need not read these arguments."""


@pytest.mark.every_release
@pytest.mark.parametrize("kind", [phases.PhaseKind.PENALTIES, phases.PhaseKind.PREFILL])
def test_a_request_has_the_sampling_parameters_of_its_phase(kind):
    """A request of the rehearsal has the sampling parameters of its phase. The test runs on every release, because the
    names and defaults of sampling parameters differ between releases."""
    limits = phases.Limits(2048, 8192, 40_000, 9, 0, stop_token=True)
    phase = next(each for each in phases.derive_phases(limits) if each.kind is kind)
    tokenizer = SimpleNamespace(eos_token_id=1, additional_stop_token_ids=None)
    made = engine_objects.make_request("a name", [7, 8, 9], 5, phase, tokenizer=tokenizer)
    params = made.sampling_params
    assert (made.rid, list(made.input_ids), params.max_new_tokens, params.ignore_eos) == ("a name", [7, 8, 9], 5, True)
    assert made.return_logprob is phase.output_logprobs is (kind is phases.PhaseKind.PENALTIES)
    assert {name: getattr(params, name) for name in phase.sampling} == phase.sampling


def arguments() -> set[str]:
    """Return the names of all server arguments of this release."""
    from sglang.srt.server_args import ServerArgs

    return set(getattr(ServerArgs, "__struct_fields__", None) or ServerArgs.__dataclass_fields__)


def arguments_read() -> set[str]:
    """Return the names of the server arguments by which kv-sizing recognizes servers whose KV cache it leaves alone."""
    names: set[str] = set()

    class Asked(dict):
        def get(self, name, default=None):
            names.add(name)
            return super().get(name, default)

    for kind in eligibility.UNSIZED:
        kind.includes(Asked(speculative_algorithm="EAGLE", attn_dp_size=2), {})
    return names


@pytest.mark.every_release
def test_each_argument_that_kv_sizing_reads_exists_in_the_engine():
    """Each server argument that kv-sizing reads exists in the engine. By these arguments, kv-sizing recognizes servers
    whose KV cache it must not size. If an argument were misspelt, kv-sizing would not recognize such a server."""
    assert arguments_read() - arguments() <= unsized_servers.ABSENT_FROM_SOME_RELEASES


@pytest.mark.every_release
def test_kv_sizing_reads_every_argument_that_selects_an_external_store_of_prompts():
    """kv-sizing reads every server argument that selects an external store of prompts, because a flush does not empty
    such a store. The test finds these arguments in the engine's code that chooses the prefix cache.
    """
    if engine_code.has_module("sglang.srt.mem_cache.registry"):
        registry = engine_code.import_module("sglang.srt.mem_cache.registry")
        chooses = [registry.default_radix_cache_factory, registry.create_tree_cache]
    else:
        chooses = [engine_code.import_module("sglang.srt.managers.scheduler").Scheduler.init_cache_with_memory_pool]
    names = {name for name in arguments() if any(engine_code.mentions(each, name) for each in chooses)}
    stores = {name for name in names if name.startswith("enable_") or name.endswith("_backend")}
    assert "enable_lmcache" in stores
    assert stores - arguments_read() <= FLUSHED_CACHE_ARGUMENTS


@pytest.mark.every_release
def test_the_largest_captured_decode_is_read_from_the_releases_own_settings():
    if not engine_code.has_module("sglang.srt.model_executor.cuda_graph_config"):
        assert "cuda_graph_max_bs" in arguments()
        assert phases._read_capture_limit({"cuda_graph_max_bs": 48}) == 48
        return
    graphs = engine_code.import_module("sglang.srt.model_executor.cuda_graph_config")
    for backend, largest in ((graphs.Backend.FULL, 48), (graphs.Backend.DISABLED, 0)):
        config = graphs.CudaGraphConfig(decode=graphs.PhaseConfig(backend=backend, max_bs=48))
        for told in (config, asdict(config)):  # the server has the object, and its report has the dictionary
            assert phases._read_capture_limit({"cuda_graph_config": told}) == largest


UNREPORTED_ATTRIBUTES = {
    # Two values that are set before a rehearsal, and a clock that separates arrivals.
    *("kv_cache_allocation_time", "processed_tokens_counter", "_prefill_decode_interval_remaining"),
    # Counters of a profile and of a test of the engine.
    *("profiler_prefill_ct", "profiler_decode_ct", "_test_stream_output_count"),
    # Sums since the last log line or message.
    *("_device_timer_window_batch_count", "_device_timer_window_gpu_time"),
    *("_mfu_log_flops", "_mfu_log_read_bytes", "_mfu_log_write_bytes", "_fpm_gpu_time_acc"),
}
"""Attributes that a scheduler increments, but neither reports nor reads. A rehearsal need not restore them."""


def attributes_added_to(kind: type) -> set[str]:
    """Return the names of the attributes that a class of the engine increments with ``+=`` or a similar operator. The
    attributes belong to ``self`` or to ``self.metrics_reporter``."""
    trees = [ast.parse(textwrap.dedent(inspect.getsource(each))) for each in kind.__mro__ if each is not object]
    return {
        node.target.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute)
        if ast.unparse(node.target.value) in ("self", "self.metrics_reporter")
    }


@pytest.mark.every_release
def test_every_counter_of_a_scheduler_is_restored_after_a_rehearsal():
    schedulers = [engine_code.import_module("sglang.srt.managers.scheduler").Scheduler]
    components = "sglang.srt.managers.scheduler_components."
    if engine_code.has_module(f"{components}metrics_reporter"):
        schedulers.append(engine_code.import_module(f"{components}metrics_reporter").SchedulerMetricsReporter)
        schedulers.append(
            engine_code.import_module(f"{components}batch_result_processor").SchedulerBatchResultProcessor
        )
    names = {name for kind in schedulers for name in attributes_added_to(kind) if not name.startswith("spec_")}
    assert {"forward_ct", "num_generated_tokens"} <= names
    assert names - UNREPORTED_ATTRIBUTES <= set(rehearsal.COUNTERS)


@pytest.mark.every_release
def test_the_first_decode_after_a_rehearsal_is_counted_as_a_servers_first():
    """Some releases add up the times between successive decodes. A server's first decode adds nothing, because no
    decode is before it. The first decode after a rehearsal must add nothing, either, although the rehearsal ran
    decodes."""
    scheduler = engine_code.import_module("sglang.srt.managers.scheduler").Scheduler
    if not hasattr(scheduler, "_record_step_counters"):
        assert not engine_code.mentions(scheduler.__init__, "decode_moment_totals")
        return
    decode_mode = engine_code.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode.DECODE
    result = SimpleNamespace(num_correct_drafts=0, get_num_generated_tokens=lambda requests: requests)
    channels = dict.fromkeys(("recv_from_tokenizer", "send_to_tokenizer", "send_to_detokenizer"))
    times = dict.fromkeys(("_prev_decode_launch_ts", "_prev_step", "_prev_prefill_end_ts"))
    runner = SimpleNamespace(model_runner=SimpleNamespace())
    made = SimpleNamespace(**channels, **times, tp_worker=runner, forward_ct=0, decode_moment_totals=[0.0] * 6)

    def decode(at_s: float) -> int:
        made.forward_ct += 1
        named = {"forward_iter": made.forward_ct, "launch_ts": at_s, "reqs": [SimpleNamespace(rid="a")]}
        batch = SimpleNamespace(forward_mode=decode_mode, after_idle_gap=False, **named)
        scheduler._record_step_counters(made, batch, result)
        return int(made.decode_moment_totals[0])

    arguments = (made, 0, SimpleNamespace(), 1, phases.derive_phases, phases.Limits(64, 300, 3000, 3, 0))
    run = rehearsal.Rehearsal(*arguments, leads=False, peaks={})
    run._save_counters()
    assert [decode(at_s) for at_s in (0.1, 0.2, 0.3)] == [0, 1, 2]
    run.end()
    assert [decode(at_s) for at_s in (0.4, 0.5)] == [0, 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("kv")
    for name in PLUGINS:
        plugins.write_module(path / "plugin", name, STAND_INS[name])
    return path


@pytest.fixture
def place(folder: Path) -> Path:
    """Return the folder for the servers of one test."""
    return Path(mkdtemp(dir=folder))


def sized_server(
    name: str, model: Path, folder: Path, *arguments: str, limited: bool = False, **variables: str
) -> Server:
    """Return a server, not yet started, with kv-sizing, the plugins of the tests (``PLUGINS``) and a prefix cache.

    :param limited: whether the server keeps the ``--max-total-tokens`` that test servers have by default.
    """
    kv_sizing_variables = {eligibility.KV_SIZING.name: "auto", eligibility.KV_MARGIN.name: MARGIN}
    path = {"PYTHONPATH": prepend_to_path(str(folder.parent / "plugin"))}
    server = make_server(name, model, folder, *SMALL, *arguments, **{**kv_sizing_variables, **path, **variables})
    server._arguments.remove("--disable-radix-cache")
    if not limited:
        remove_argument(server, "--max-total-tokens")
    return server


def remove_argument(server: Server, argument: str) -> None:
    place = server._arguments.index(argument)
    del server._arguments[place : place + 2]


def server_info(running: Server) -> dict[str, Any]:
    return httpx.get(f"{running.url}/get_server_info", timeout=PATIENCE).raise_for_status().json()


def log_lines(running: Server) -> list[str]:
    """Return the log lines of kv-sizing, without their prefix."""
    return [line.partition(LOG_PREFIX)[2] for line in running.log_text().splitlines() if LOG_PREFIX in line]


def metric_samples(metrics: str) -> list[list[str]]:
    """Return the name and value of each metric, without the label that contains the process."""
    lines = [re.sub(r',?pid="\d+"', "", line) for line in metrics.splitlines() if not line.startswith("#")]
    return [line.rsplit(" ", 1) for line in lines]


VARYING_NAMES = re.compile(
    r"port$|launch_command|ts_tic|timestamp|created|modified_at|seconds|throughput|(startup|load_weights)_time"
    r"|available_gpu_memory|startup_available|busy_us|endpoint=\"/health\"|decode_moments [24]"
    r"|_cuda_graph_config_locked"
)
"""Pattern for the names of values that differ between two stock servers:

- ports, times, speeds, and the free memory of the machine
- the number of health checks during a start
- the order of a set
- entries 2 and 4 of the engine's ``decode_moments``, which are sums over decode steps: of the durations, and of batch
  size times duration
"""


def plain_values(name: str, value: Any) -> Iterator[tuple[str, object]]:
    """Yield the path and the value of each plain value within a JSON value."""
    nested = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if nested is None:
        yield name, value
    else:
        for key, each in nested:
            yield from plain_values(f"{name} {key}", each)


def reported_values(running: Server) -> dict[str, object]:
    """Return the answers of all GET endpoints of a server, and its metrics. Values whose names match
    :data:`VARYING_NAMES` are left out."""
    once = httpx.Limits(max_keepalive_connections=0)  # a reused connection may be closed during a slow answer
    with httpx.Client(base_url=running.url, timeout=PATIENCE, follow_redirects=True, limits=once) as client:
        endpoints = client.get("/openapi.json").raise_for_status().json()["paths"]
        values: dict[str, object] = {f"{path} takes": sorted(methods) for path, methods in endpoints.items()}
        for path, methods in endpoints.items():
            # Leave out endpoints that also accept POST, which have an effect, and endpoints with a parameter.
            if "get" in methods and "post" not in methods and "{" not in path:
                answer = client.get(path)
                is_json = "json" in answer.headers.get("content-type", "")
                values |= plain_values(
                    path, {"status": answer.status_code, "says": answer.json() if is_json else answer.text}
                )
        values |= metric_samples(client.get("/metrics").raise_for_status().text)
    return {name: value for name, value in values.items() if not VARYING_NAMES.search(name)}


USER_LIMITS = ["--max-total-tokens", "2000", "--max-queued-requests", "1", "--prefill-max-requests", "1"]


@pytest.fixture(scope="module")
def equal_servers(folder: Path, checkpoint) -> dict[str, SimpleNamespace]:
    """Run a stock server, and servers that must behave as the stock server. Return the answers, the reported values and
    kv-sizing's log lines of each server, by name. The server ``rehearsed`` rehearses, but a limit of the user prevents
    its KV cache from growing."""
    place = folder / "equal"
    place.mkdir()
    variables = {"stock": {"SGLANG_MOE_PATCHES": "none"}, "rehearsed": {}}
    if RELEASE == DEFAULT:  # one release is enough: kv-sizing does not run
        variables["unset"] = {eligibility.KV_SIZING.name: ""}
    more = [*USER_LIMITS, "--random-seed", "1", "--enable-metrics"]
    # A health check would compute a token, and a loaded machine repeats the check.
    counted = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
    servers = [
        sized_server(name, checkpoint(), place, *more, limited=True, **counted, **each)
        for name, each in variables.items()
    ]
    with start_servers(*servers):
        return {
            each.name: SimpleNamespace(answers=answered, tells=reported_values(each), log_lines=log_lines(each))
            for each, answered in zip(servers, ask_servers(*servers), strict=True)
        }


@pytest.mark.every_release
def test_a_server_reports_and_counts_as_stock_without_the_variable_and_after_a_rehearsal(equal_servers):
    """A server answers and reports as a stock server if kv-sizing is off, and also after a rehearsal that leaves the KV
    cache size unchanged. The rehearsal lifts the user's limits, which would reject most of its requests. After the
    rehearsal, the limits are in force again."""
    stock = equal_servers["stock"]
    assert {"/server_info status", "/v1/models status"} <= set(stock.tells)
    for name, other in equal_servers.items():
        assert other.answers == stock.answers
        ours = {metric for metric in other.tells if metric.startswith(serving.PREFIX)}
        assert bool(ours) == bool(other.log_lines) == (name == "rehearsed")
        assert {metric: value for metric, value in other.tells.items() if metric not in ours} == stock.tells
    told = equal_servers["rehearsed"].log_lines
    assert any(line.startswith("rehearsed in ") and "not reached" not in line for line in told)
    assert "KV cache kept at 2,000 tokens; " in told[-1]
    assert "--max-total-tokens 2,000 allows no more" in told[-1]


def tokens(running: Server) -> int:
    """Return the KV cache size in tokens, after a check that the launcher and all schedulers report the same size."""
    info = server_info(running)
    (count,) = {info["max_total_num_tokens"], *capacities(running)}
    return int(count)


def capacities(running: Server) -> set[int]:
    """Return the KV cache sizes that the schedulers report, in tokens. (The launcher always reports the size at the
    server's start.)"""
    return {int(each["memory_usage"]["token_capacity"]) for each in server_info(running)["internal_states"]}


def number(text: str) -> int:
    return int(text.replace(",", ""))


def logged_sizes(running: Server) -> list[tuple[int, int, str]]:
    """Return three values for each change of the KV cache size in the log: the new size in tokens, the size by the
    engine's rule in tokens, and the log line."""
    matches = [
        re.match(r"KV cache (?:grown|shrunk) from ([\d,]+) to ([\d,]+) tokens; ", line) for line in log_lines(running)
    ]
    return [(number(match[2]), number(match[1]), match.string) for match in matches if match]


def only_logged_size(running: Server) -> tuple[int, int, str]:
    """Return three values of the only log line about a new KV cache size: the new size in tokens, the size by the
    engine's rule in tokens, and the ``--mem-fraction-static`` that gives the new size without kv-sizing."""
    ((now, rule, line),) = logged_sizes(running)
    pattern = r".* tokens; 200 MB stay free.*\. The same size without measuring: --mem-fraction-static (0\.\d{4})"
    found = re.fullmatch(pattern, line)
    assert found is not None, line
    return now, rule, found[1]


LONG = [[token % 600 + 3 for token in range(start, start + 280)] for start in (0, 100, 200)]


def answers_at_once(running: Server, prompts: list[list[int]]) -> list[list[int]]:
    """Send prompts to a server at the same time, and return the answers."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda prompt: ask_servers(running, prompts=[prompt])[0][0], prompts))


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.5)
    raise AssertionError("it does not happen")


@pytest.mark.compatibility
@pytest.mark.every_release
def test_a_first_start_grows_the_kv_cache_and_frees_memory_when_it_is_short(place: Path, engine, checkpoint):
    """At a first start, the KV cache grows. When memory becomes short, kv-sizing frees a part of the KV cache. The
    answers stay right.

    - Three requests run at once. The KV cache by the engine's rule has room for only one request.
    - FlashInfer tunes its kernels before the KV cache grows, because tuning may take much memory.
    """
    expected = answers_in_process(engine, engine.load(checkpoint()), [*PROMPTS, *LONG])
    short, scan, tunes = place / "short", place / "scan", place / "tunes"
    variables = {"CACHE": "1600000", "GAIN": "150000000", "SHORT": str(short), "SCAN": str(scan), "TUNES": str(tunes)}
    grown = sized_server("grown", checkpoint(), place, "--enable-metrics", **variables)
    answered = watch_health(grown)
    with start_servers(grown):
        log = grown.log_text()
        assert log.index("rehearsed in") < log.index("The server is fired up")
        assert {answer for answer, text in answered if "rehearsed in" not in text} <= {"ConnectError", "503"}
        now, rule, _ = only_logged_size(grown)
        assert tokens(grown) == now > 3 * len(LONG[0]) > rule > 320
        assert not any("not reached" in line for line in log_lines(grown))
        left = [line for line in scan.read_text().splitlines() if not HARMLESS_PATHS.search(line)]
        assert left == []
        assert re.fullmatch(r"(maps\n)+(tunes\n)+(maps\n)+", tunes.read_text())
        assert ask_servers(grown, prompts=[*PROMPTS, *LONG])[0] == expected
        assert answers_at_once(grown, LONG) == expected[2:]
        shown = dict(metric_samples(httpx.get(f"{grown.url}/metrics", follow_redirects=True, timeout=PATIENCE).text))
        numbers = {name.split("{")[0]: float(value) for name, value in shown.items()}
        assert numbers[serving.TOKENS] == numbers["sglang:max_total_num_tokens"] == now
        assert (numbers[serving.BY_RULE], numbers[serving.GIVEN_BACK]) == (rule, 0)
        assert shown[f'{serving.STATE}{{gpu="0",rank="0",reason="",state="grown"}}'] == "1.0"

        short.write_text("110000000")  # bytes that leave 90 MB of the margin's 200 MB free
        wait_for(lambda: "memory was short" in log_lines(grown)[-1])
        (less,) = capacities(grown)
        assert rule < less < now
        assert ask_servers(grown, prompts=[*PROMPTS, *LONG])[0] == expected
        assert answers_at_once(grown, LONG[:2]) == expected[2:4]
        httpx.post(f"{grown.url}/flush_cache", timeout=PATIENCE).raise_for_status()
        assert ask_servers(grown, prompts=PROMPTS)[0] == expected[:2]


@DEFAULT_ENGINE_ONLY
@pytest.mark.long("turns that take a tenth of a second longer, so that memory is short while prompts are computed")
def test_short_memory_ends_no_chunked_prompt_and_starves_no_waiting_request(folder: Path, checkpoint):
    """Freeing KV cache memory must neither end a chunked prompt nor make a request wait forever. A chunked prompt could
    end, because the engine does not check for free tokens before the second chunk. A request could wait forever,
    because the engine admits a request only if more tokens are free than the request needs. A KV cache of exactly this
    number of tokens would therefore be too small."""
    place = folder / "short"
    place.mkdir()
    short, turn_s = place / "short", place / "turn"
    sizes = {"CACHE": "6000000", "GAIN": "3000000", "SHORT": str(short), "TURN_S": str(turn_s)}
    grown = sized_server("grown", checkpoint(), place, "--context-length", "1500", **sizes)
    half = [[token * seed % 600 + 3 for token in range(900)] for seed in (7, 11)]

    def ask(prompt: list[int], new: int) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        asked = {"input_ids": prompt, "sampling_params": sampling}
        answer = httpx.post(f"{grown.url}/generate", json=asked, timeout=PATIENCE).raise_for_status()
        return list(answer.json()["output_ids"])

    asked = [(LONG[0], 100), (half[0], 10), (half[1], 50)]  # the last request has room once another one has ended
    with start_servers(grown), ThreadPoolExecutor() as pool:
        expected = [ask(*each) for each in asked]
        (before,) = capacities(grown)
        httpx.post(f"{grown.url}/flush_cache", timeout=PATIENCE).raise_for_status()
        turn_s.write_text("0.1")
        answered = []
        for each in asked:
            answered.append(pool.submit(ask, *each))
            time.sleep(1)
        short.write_text("110000000")
        assert [each.result() for each in answered] == expected
        wait_for(lambda: "memory was short" in log_lines(grown)[-1])
        assert max(capacities(grown)) < before


@pytest.mark.every_release
def test_flashinfer_is_tuned_before_a_server_serves_and_nowhere_else():
    """The engine tunes FlashInfer only before a server serves requests. Up to 0.5.13, it tunes FlashInfer after it has
    made the memory pools and before it captures graphs. Later releases tune FlashInfer when they make the runners of
    forward passes.
    """
    runner = engine_code.import_module("sglang.srt.model_executor.model_runner").ModelRunner
    if hasattr(runner, "kernel_warmup"):
        steps = [f"self.{name}" for name in ("init_memory_pool", "kernel_warmup", "init_device_graphs")]
        lines = [min(call.lineno for call in engine_code.find_calls(runner.initialize, step)) for step in steps]
        assert lines == sorted(lines)
        tunes = [runner.kernel_warmup]
    else:
        runner = engine_code.import_module("sglang.srt.model_executor.runner.base_runner").BaseRunner
        tunes = [getattr(runner, name) for name in ("warmup", "_warmup") if hasattr(runner, name)]
    assert any(engine_code.mentions(each, "_flashinfer_autotune") for each in tunes)
    sources = {
        path.name: path.read_text() for path in Path(engine_code.import_module("sglang.srt").__path__[0]).rglob("*.py")
    }
    enters = re.compile(r"from flashinfer\.autotuner import [^\n]*\bautotune\b(?!.*\bautotune\(False)", re.DOTALL)
    assert {name for name, source in sources.items() if enters.search(source)} <= {
        *("model_runner.py", "flashinfer_autotune.py")
    }


HARMLESS_PATHS = re.compile(
    # Size of the address space, and from 0.5.14 on the inputs of an eager forward pass.
    r"_kvcache|kv_pool|kvcache|server_args|ServerArgs|_eager_registry"
    # Free tokens in a scheduler's last periodic report, which may be older than the KV cache's growth.
    r"|stats\.kv_available_tokens"
    # Last requests of the rehearsal, which releases before 0.5.13 keep until the next prefill. Their token ids may
    # equal any number.
    r"|scheduler\.(can_run_list\[|adder\..*chunked_req\.)"
)
"""Pattern for the paths of attributes that may still have the size of the engine's rule after the KV cache has grown.
No code uses these attributes as the KV cache size."""


@DEFAULT_ENGINE_ONLY
def test_a_server_starts_if_the_rule_leaves_no_kv_cache(place: Path, checkpoint):
    grown = sized_server("grown", checkpoint(), place, CACHE="-1000000", GAIN="30000000")
    with start_servers(grown):
        assert ask_servers(grown, prompts=[LONG[0]]) == ask_servers(grown, prompts=[LONG[0]])
        now, rule, _ = only_logged_size(grown)
        assert tokens(grown) == now > 1000
        assert rule == 0
    assert "leaves too little KV cache for the rehearsal; the rehearsal starts with" in log_lines(grown)[0]


@pytest.mark.ci
@DEFAULT_ENGINE_ONLY
def test_a_given_fraction_is_kept_with_auto_and_sets_the_first_size_with_always(place: Path, checkpoint):
    by_hand = ("--mem-fraction-static", "0.91")
    alone = sized_server("alone", checkpoint(), place, *by_hand, GIVEN="0.91")
    shrinks = sized_server(
        "shrinks", checkpoint(), place, *by_hand, GAIN="-60000000", SGLANG_MOE_PATCHES_KV_SIZING="always"
    )
    with start_servers(alone, shrinks):
        assert ask_servers(alone, prompts=PROMPTS) == ask_servers(shrinks, prompts=PROMPTS)
        less, rule, fraction = only_logged_size(shrinks)
        assert (tokens(alone), tokens(shrinks)) == (rule, less)
    assert log_lines(alone) == [
        "using the given --mem-fraction-static 0.9100 because it was given; "
        "SGLANG_MOE_PATCHES_KV_SIZING=always measures all the same"
    ]
    assert 0.35 < less / rule < 0.45  # kv-sizing frees 60 of 100 MB
    too_little = "the given --mem-fraction-static leaves too little memory for the largest forward passes"
    assert log_lines(shrinks)[-1] == f"{too_little}; set --mem-fraction-static {fraction}"


@pytest.mark.ci
@pytest.mark.compatibility
@pytest.mark.every_release
def test_default_request_limit_is_what_sampling_memory_allows(place: Path, checkpoint):
    """The default limit of concurrent requests depends on the memory for sampling. Here the limit is 300 to 400,
    although the KV cache has room for 1,292 requests. If a decode has more requests than the largest decode graph,
    kv-sizing gives up at most 1/32 of the KV cache for the further requests."""
    # Each chunk has many prompts, so a few forward passes compute hundreds of requests.
    flags = ["--decode-log-interval", "1", "--chunked-prefill-size", "256"]
    merges = place / "merges"
    grown = sized_server(
        "grown", checkpoint(), place, *flags, BYTES_PER_REQUEST="60000", CACHE="160000000", MERGES=str(merges)
    )
    remove_argument(grown, "--max-running-requests")
    prompts = [[7 + each % 500, 8, 9] for each in range(300)]
    with start_servers(grown):
        assert not any("not reached" in line for line in log_lines(grown))
        told = re.match(r"at most (\d+) requests run at once, and at most 256 in a batch", log_lines(grown)[-1])
        assert told is not None
        assert 300 < int(told[1]) < 400
        before = len(grown.log_text())
        for more in ({}, {"presence_penalty": 0.5}, {}):
            # The first requests decode longer, so that they still run when the last are admitted.
            lengths = [24 if each < 50 else 6 for each in range(len(prompts))]
            sampling = [{"temperature": 0, "max_new_tokens": new, "ignore_eos": True} | more for new in lengths]
            body = {"input_ids": prompts, "sampling_params": sampling}
            httpx.post(f"{grown.url}/generate", json=body, timeout=PATIENCE).raise_for_status()
            running = [int(count) for count in re.findall(r"#running-req: (\d+)", grown.log_text()[before:])]
            before = len(grown.log_text())
            assert max(running) == (256 if more else 300)
    # The engine keeps the penalized batch for one more turn. Later requests must not be merged into it.
    assert max(map(int, merges.read_text().split())) <= 256


@pytest.mark.ci
def test_requests_that_take_more_memory_than_estimated_are_not_admitted(place: Path, checkpoint):
    sampling_bytes = {"BYTES_PER_REQUEST": "60000", "CACHE": "160000000", "BYTES_ABOVE_256_REQUESTS": "2000000000"}
    grown = sized_server("grown", checkpoint(), place, "--chunked-prefill-size", "256", **sampling_bytes)
    remove_argument(grown, "--max-running-requests")
    with start_servers(grown):
        logged_size, told = log_lines(grown)[-2:]
        assert [
            line for line in log_lines(grown) if line.startswith("rehearses again with at most 256 requests at once")
        ]
    assert told.startswith("at most 256 requests run at once, and at most 256 in a batch")
    assert logged_size.startswith("KV cache grown from ")


FLAGS: dict[str, tuple[list[str], dict[str, str]]] = {
    # A Triton kernel hashes the seeds. Without a GPU, it runs in Triton's interpreter.
    "on policy": (["--rl-on-policy-target", "fsdp"], {"TRITON_INTERPRET": "1"}),
    "interval": (["--scheduler-recv-interval", "5"], {}),
    "grammar": (["--grammar-backend", "llguidance"], {}),  # the engine's xgrammar masks no logits on a CPU
}


# The engine hashes seeds on a CPU from 0.5.23 on with a kernel that its package for GPUs does not contain. A stock
# server fails in the same way.
SEEDED = pytest.mark.skipif(
    ALL.index(RELEASE) >= ALL.index("0.5.23"), reason="this release cannot sample with a seed on the CPU"
)


@pytest.mark.product
@pytest.mark.every_release
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=SEEDED if kind == "on policy" else ()) for kind in FLAGS])
def test_a_sized_server_with_further_flags_answers_as_stock_before_and_after_shrinking(
    kind: str, place: Path, checkpoint
):
    flags, variables = FLAGS[kind]
    short = place / "short"
    model = checkpoint(family="qwen3-moe")  # with this attention, the engine refuses deterministic DeepSeek
    grown = sized_server("grown", model, place, *flags, SHORT=str(short), **variables)
    stock = sized_server("stock", model, place, *flags, limited=True, SGLANG_MOE_PATCHES="none", **variables)
    with start_servers(grown, stock):
        assert not any("not reached" in line for line in log_lines(grown))
        expected = ask_servers(stock, prompts=PROMPTS)
        assert ask_servers(grown, prompts=PROMPTS) == expected
        if kind == "grammar":
            assert ask_with_grammar(grown) == ask_with_grammar(stock) != expected[0][0]
        now, rule, _ = only_logged_size(grown)
        assert tokens(grown) == now > rule
        short.write_text("110000000")  # bytes that leave 90 MB of the margin's 200 MB free
        wait_for(lambda: "memory was short" in log_lines(grown)[-1])
        assert capacities(grown).pop() < now
        assert ask_servers(grown, prompts=PROMPTS) == expected
        assert httpx.get(f"{grown.url}/health", timeout=PATIENCE).status_code == 200


def find_processes(command: str) -> list[psutil.Process]:
    """Return the processes of the tests' servers whose command line begins with a text. They are sorted by command
    line."""
    found: dict[str, psutil.Process] = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if line.startswith(command):
                found.setdefault(line, process)
    return [found[line] for line in sorted(found)]


@pytest.mark.product
@pytest.mark.every_release
@pytest.mark.parametrize("process_kind", ["launcher", "rank"])
def test_a_server_can_be_ended_while_it_rehearses(process_kind: str, place: Path, checkpoint):
    """If the launcher or a rank is ended during the rehearsal, all processes of the server end. Kubernetes sends
    SIGTERM to the launcher."""
    ended = sized_server("ended", checkpoint(), place, "--tp", "2", HOLDS="1")
    signalled: list[psutil.Process] = []

    def end(seconds: float, line: str) -> None:
        if "a forward pass is held" in ended.log_text() and not signalled:
            if process_kind == "launcher":
                signalled.extend(find_processes(f"{sys.executable} -m sglang.launch_server"))
                signalled[0].terminate()
            else:
                signalled.extend(find_processes("sglang::scheduler"))
                signalled[1].kill()

    ended.progress = end
    with pytest.raises(ServerFailed), start_servers(ended):
        pytest.fail("it serves")
    assert signalled


@pytest.mark.product
@pytest.mark.every_release
def test_a_rank_that_is_killed_while_memory_is_freed_ends_the_server(place: Path, checkpoint):
    short = place / "short"
    ended = sized_server("ended", checkpoint(), place, "--tp", "2", SHORT=str(short))
    with start_servers(ended):
        ask_servers(ended, prompts=PROMPTS)
        launcher = find_processes(f"{sys.executable} -m sglang.launch_server")[0]
        short.write_text("110000000")
        find_processes("sglang::scheduler")[1].kill()
        assert psutil.wait_procs([launcher], timeout=PATIENCE)[1] == []


def ask_with_grammar(running: Server) -> list[int]:
    """Return the tokens of an answer to a request with a grammar."""
    sampling = {"temperature": 0, "max_new_tokens": 8, "regex": "(yes|no){1,9}"}
    body = {"input_ids": PROMPTS[0], "sampling_params": sampling}
    answer = httpx.post(f"{running.url}/generate", json=body, timeout=PATIENCE).raise_for_status()
    return list(answer.json()["output_ids"])


@pytest.mark.ci
@pytest.mark.every_release
def test_schedulers_sleep_only_after_the_start_and_without_work(place: Path, checkpoint):
    """Schedulers sleep only after the server's start, and only without requests. A scheduler sleeps up to a second. If
    it slept during a rehearsal, each idle turn would take this time."""
    sleepy = sized_server("sleepy", checkpoint(), place, SLEEPS="1")
    awake = sized_server("awake", checkpoint(), place, SLEEPS="1")
    awake._arguments.remove("--sleep-on-idle")  # test servers have this flag to save processor time
    with start_servers(sleepy, awake):
        assert ask_servers(sleepy, prompts=PROMPTS) == ask_servers(awake, prompts=PROMPTS)
        assert tokens(sleepy) == tokens(awake) > only_logged_size(awake)[1]
        wait_for(lambda: "a scheduler sleeps" in sleepy.log_text())
    before, line, _ = sleepy.log_text().partition("KV cache grown from ")
    assert line
    assert "a scheduler sleeps" not in before
    assert "a scheduler sleeps" not in awake.log_text()


@pytest.mark.ci
@pytest.mark.every_release
@pytest.mark.parametrize("kind", ["alone", "tensors"])
def test_a_rehearsed_forward_pass_that_raises_ends_only_the_rehearsal(kind, place: Path, checkpoint):
    """If a rehearsed forward pass raises an exception, only the rehearsal ends. The server keeps the KV cache size of
    the engine's rule, and serves. In this test, every rank raises the exception in the same forward pass. The requests
    of the batch are dropped, and their slots become free."""
    if kind == "alone":
        raises = sized_server("raises", checkpoint(), place, RAISES="3 all")
    else:
        raises = server_of_two_ranks(kind, "raises", checkpoint(), place, RAISES="3 all")
    with start_servers(raises):
        told = ask_servers(raises, prompts=[*PROMPTS, *PROMPTS])[0]
        assert told[:2] == told[2:]
        as_by_the_rule = re.match(r"KV cache kept at ([\d,]+) tokens; ", log_lines(raises)[-1])
        assert as_by_the_rule is not None
        assert tokens(raises) == number(as_by_the_rule[1])
    assert "the rehearsal failed: rank 0: AssertionError: no such forward pass" in log_lines(raises)[-1]


def watch_health(running: Server) -> list[tuple[str, str]]:
    """Request ``/health`` repeatedly while a server starts. The returned list receives each answer, together with the
    whole log at that time."""
    answered: list[tuple[str, str]] = []

    def ask(seconds: float, line: str) -> None:
        try:
            answer = str(httpx.get(f"{running.url}/health", timeout=5).status_code)
        except httpx.HTTPError as error:
            answer = type(error).__name__
        answered.append((answer, running.log_text()))

    running.progress = ask
    return answered


@pytest.mark.every_release
def test_known_pools_are_classes_of_the_engine():
    found = {
        name: getattr(engine_code.import_module(f"sglang.srt.mem_cache.{module}"), name)
        for name, module in POOL_MODULES.items()
    }
    assert {"SWAKVPool", "HybridLinearKVPool"} <= set(found) & pools.KNOWN_POOLS
    for name in ("SWAKVPool", "HybridLinearKVPool"):
        assert engine_code.sets_attribute(found[name].__init__, "mem_usage")
    assert engine_code.sets_attribute(found["SWAKVPool"].__init__, "size_swa")
    assert "mamba_pool" in engine_code.read_source(found["HybridReqToTokenPool"])
    assert engine_code.sets_attribute(found["MambaPool"].__init__, "mem_usage")
    assert pools.hybrid_kind(found["SWAKVPool"].__new__(found["SWAKVPool"]), None) == pools.WINDOWS


VISION_CONFIG = SimpleNamespace(num_hidden_layers=27, hidden_size=1152)


@pytest.mark.every_release
@pytest.mark.parametrize(("vision", "factor"), [(VISION_CONFIG, 0.9097), (SimpleNamespace(), 0.95), (None, 1.0)])
def test_the_image_allowance_equals_the_memory_that_the_rule_reserves(vision, factor: float, monkeypatch):
    config = SimpleNamespace(hf_config=SimpleNamespace(vision_config=vision))
    assert engine_rule.image_factor(config) == pytest.approx(factor, abs=1e-4)
    for name, cache in (("", 100), ("4096", 4096)):
        monkeypatch.setenv("SGLANG_VLM_CACHE_SIZE_MB", name)
        if not name:
            monkeypatch.delenv("SGLANG_VLM_CACHE_SIZE_MB")
        assert engine_rule.image_cache_gib({}) == cache / 1024
        assert engine_rule.reserved_by_configurator_gib({}) in (None, cache / 1024)


def answers_about_images(running: Server) -> list[Any]:
    """Return the tokens and log-probabilities of answers about two images. The images are sent one by one, and
    together."""
    shown = [image_model.picture(96, 128), image_model.picture(200, 64)]
    found = []
    for some in ([shown[0]], [shown[1]], shown):
        body = {"text": dummy_models.IMAGE * len(some) + "What is this?", "image_data": some, "return_logprob": True}
        body["sampling_params"] = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        answer = httpx.post(f"{running.url}/generate", json=body, timeout=PATIENCE).raise_for_status().json()
        found.append((answer["output_ids"], answer["meta_info"]["output_token_logprobs"]))
    return found


@pytest.mark.ci
@DEFAULT_ENGINE_ONLY
def test_a_server_for_images_keeps_the_image_allowance_free_and_answers_as_stock(folder: Path, place: Path):
    model, weights = image_model.write(place / "model"), dummy_weights.write_plugin(place / "weights")
    path = prepend_to_path(*map(str, [folder / "plugin", *weights]))

    def taking_images(name: str, *, limited: bool = False, **variables: str) -> Server:
        made = sized_server(name, model, place, "--load-format", "dummy", limited=limited, PYTHONPATH=path, **variables)
        made._arguments[made._arguments.index(ROUTED)] = "triton"
        for argument in ("--quantization", "modelopt_fp4"):
            made._arguments.remove(argument)
        return made

    stock = taking_images("stock", limited=True, SGLANG_MOE_PATCHES="none")
    # The free memory is larger than the memory that kv-sizing reserves for images.
    kept = taking_images("kept", GAIN="5000000000")
    with start_servers(stock, kept):
        expected = answers_about_images(stock)
        assert answers_about_images(stock) == answers_about_images(kept) == expected
    assert expected[0] != expected[1]
    ((now, rule, line),) = logged_sizes(kept)
    share = number(re.search(r"([\d,]+) MB for images", line)[1])
    token_bytes = 100_000_000 / rule  # the stand-in's rule leaves 100 MB to the KV cache
    assert share > 100
    assert (now - rule) * token_bytes == pytest.approx(5_000_000_000 - share * 1_000_000, abs=2_000_000)


# Once a request has found no free sliding window, 0.5.11 admits no request until another one has ended. With fewer
# windows the KV cache would not grow.
SMALL_WINDOW_RATIO = "0.1" if RELEASE == "0.5.11" else "0.01"
KINDS = {
    # The pool has room for few tokens of sliding windows, so that they limit the number and the length of requests.
    "windows": ["--max-running-requests", "40", "--swa-full-tokens-ratio", SMALL_WINDOW_RATIO],
    # Each request needs a Mamba state. The pool's room for states limits the number of requests.
    "states": ["--max-running-requests", "64"],
}
if RELEASE == DEFAULT:
    KINDS["states that are tracked"] = [*KINDS["states"], "--mamba-scheduler-strategy", "extra_buffer"]


@pytest.mark.product
@pytest.mark.every_release
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_with_pools_of_more_than_one_kind_grows(kind: str, place: Path, checkpoint):
    running = sized_server("grown", checkpoint(family="qwen3-moe"), place, *KINDS[kind], POOLS=kind.split()[0])
    with start_servers(running):
        assert ask_servers(running, prompts=PROMPTS) == ask_servers(running, prompts=PROMPTS)
        now = server_info(running)["max_total_num_tokens"]
    ((told, rule, _),) = logged_sizes(running)
    assert now == told > rule
    assert not any("not reached" in each for each in log_lines(running))


@pytest.mark.product
@pytest.mark.every_release
def test_a_rehearsed_prefix_leaves_sliding_windows_for_a_chunk_after_it(place: Path, checkpoint):
    """The rehearsal computes a long prefix in parts, and then a prefill chunk after the prefix. The radix cache keeps
    one sliding window for each part. Many parts would fill a small pool of sliding windows. The rehearsal must choose
    the parts so that the pool has room for the chunk."""
    few = ["--swa-full-tokens-ratio", "0.8", "--max-total-tokens", "193"]
    running = sized_server(
        "grown", checkpoint(family="qwen3-moe"), place, *few, limited=True, POOLS="windows", WINDOW="60"
    )
    with start_servers(running):
        ask_servers(running, prompts=PROMPTS[:1])
    (line,) = [line for line in log_lines(running) if line.startswith("rehearsed in ")]
    assert "prefill chunk behind the longest prefix" in line
    assert "not reached" not in line


def rehearsed_passes(folder: Path) -> list[list[list[str]]]:
    """Return the rehearsed forward passes of each rank. A forward pass has four values: its mode, its number of tokens,
    its number of requests, and the number of tokens of all data-parallel ranks."""
    return [[line.split() for line in (folder / "steps" / rank).read_text().splitlines()] for rank in "01"]


def server_of_two_ranks(kind: str, name: str, model: Path, folder: Path, **variables: str) -> Server:
    """Return a server of two ranks, not yet started. It records its forward passes in the folder
    ``folder / name / "steps"``, from which :func:`rehearsed_passes` reads them."""
    plugins.write_module(folder / name / "gathers", "gathers_on_cpu", STAND_INS["gathers_on_cpu"])
    (folder / name / "steps").mkdir()
    path = prepend_to_path(str(folder / name / "gathers"), str(folder.parent / "plugin"))
    variables |= {"PYTHONPATH": path, "STEPS": str(folder / name / "steps")}
    return sized_server(name, model, folder / name, *RANKS[kind], **variables)


MANY = ["--max-running-requests", "20"]
RANKS = {
    "tensors": ["--tp", "2"],
    "attention": ["--tp", "2", "--dp-size", "2", "--enable-dp-attention", *MANY, "--chunked-prefill-size", "256"],
    "stages": ["--pp-size", "2", *MANY, "--chunked-prefill-size", "128"],
}
STEPS_OF = {
    "tensors": (["EXTEND", "64", "1", "64"], ["DECODE", "3", "3", "3"]),
    # Each rank has half of a chunk's 256 tokens, and half of the 20 requests.
    "attention": (["EXTEND", "128", "1", "256"], ["DECODE", "10", "10", "20"]),
    # Two batches run at the same time, and each has half of the 20 requests.
    "stages": (["EXTEND", "128", "1", "128"], ["DECODE", "10", "10", "10"]),
}


@pytest.mark.product
@pytest.mark.every_release
@pytest.mark.parametrize("kind", RANKS)
def test_ranks_rehearse_together_and_grow_together_or_not_at_all(kind: str, place: Path, checkpoint):
    """If one rank fails or cannot map memory, no rank's KV cache grows. If memory is short, all ranks free KV cache
    memory."""
    short = place / "short"
    given = {"grown": {"SHORT": str(short)}, "fails": {"FAILS": "1"}, "maps": {"MAP_FAILS": "1"}}
    servers = {
        name: server_of_two_ranks(kind, name, checkpoint(), place, **variables) for name, variables in given.items()
    }
    with start_servers(*servers.values()):
        told = {name: ask_servers(each, prompts=PROMPTS) for name, each in servers.items()}
        sizes = {name: tokens(each) for name, each in servers.items()}
        short.write_text("110000000")  # bytes that leave 90 MB of the margin's 200 MB free
        wait_for(lambda: "memory was short" in log_lines(servers["grown"])[-1])
        wait_for(lambda: len(capacities(servers["grown"])) == 1)
        assert capacities(servers["grown"]).pop() < sizes["grown"]
        assert ask_servers(servers["grown"], prompts=PROMPTS)[0] == told["grown"][0]
    assert told["grown"] == told["fails"] == told["maps"]
    assert sizes["grown"] > sizes["fails"] == sizes["maps"]
    one, other = rehearsed_passes(place / "grown")
    assert one == other
    for step in STEPS_OF[kind]:
        assert step in one
    why = {name: "\n".join(log_lines(each)) for name, each in servers.items()}
    assert "the rehearsal failed: rank 1: RuntimeError: the driver does not answer" in why["fails"]
    assert "rank 1 could not map memory for a larger KV cache: nothing is left" in why["maps"]
    assert "not reached" not in why["grown"]


@pytest.mark.product
@pytest.mark.every_release
def test_replicas_rehearse_and_grow_independently(place: Path, checkpoint):
    grown = sized_server("grown", checkpoint(), place, "--dp-size", "2")
    stock = make_server("stock", checkpoint(), place, *SMALL, "--dp-size", "2", SGLANG_MOE_PATCHES="none")
    with start_servers(grown, stock):
        assert ask_servers(grown, prompts=PROMPTS) == ask_servers(stock, prompts=PROMPTS)
        now = tokens(grown)
    assert [told for told, *_ in logged_sizes(grown)] == [now, now]


def two_machines(model: Path, place: Path) -> list[Server]:
    """Return the two halves of a server, not yet started. Each half has one rank, as on a machine of its own."""
    given = ["--tp", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}", "--node-rank"]
    return [sized_server(f"machine{rank}", model, place, *given, str(rank)) for rank in range(2)]


@pytest.mark.product
@pytest.mark.every_release
@pytest.mark.parametrize("without", ["", "0", "1"])
def test_machines_grow_together_and_do_not_wait_for_a_machine_that_takes_no_part(without: str, place: Path, checkpoint):
    machines = two_machines(checkpoint(), place)
    if without:
        machines[int(without)].environment[eligibility.KV_SIZING.name] = "off"
    with start_servers(*machines):
        ask_servers(machines[0], prompts=PROMPTS)
    told = ["\n".join(log_lines(each)) for each in machines]
    if not without:
        assert "KV cache grown from " in told[0]
        assert told[1] == ""
        return
    assert told[int(without)] == ""
    why = "of --nnodes: not all machines were ready to size the KV cache together within 15 s"
    assert without == "0" or why in told[0]
