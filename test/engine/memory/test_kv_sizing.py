"""kv-sizing in real servers on the CPU: what is measured is a stand-in's, all else is the engine's.

A plugin says how much memory is free before loading, after it and at the worst moment. What the second start makes of
it is the engine's own KV cache.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import image_model
import pytest
import unsized_servers
from common import dummy_weights, kinds, plugins
from conftest import DEFAULT_ENGINE_ONLY, RELEASE
from releases import DEFAULT, ROOT
from servers import PATIENCE, ROUTED, Server, answers, on_path, server, started
from sglang_moe_patches.core import engine as seen
from sglang_moe_patches.lab import kv_records
from sglang_moe_patches.lab.servers.server import ServerFailed, free_port
from sglang_moe_patches.memory.kv_sizing import (
    eligibility,
    facts,
    fingerprint,
    images,
    metrics,
    phases,
    record,
    rehearsal,
    sizing,
)

STAND_INS = (ROOT / "test/standins/tells_memory.py").read_text()
POOLS = (ROOT / "test/standins/has_pools.py").read_text()
GATHERS = (ROOT / "test/standins/gathers_on_cpu.py").read_text()
FREE, MARGIN = 300_000_000, 200_000_000
SMALL = ["--chunked-prefill-size", "64", "--max-running-requests", "3", "--context-length", "320"]
PROMPTS = [[7, 8, 9], list(range(3, 203))]
OF_SEVERAL = dict.fromkeys(("HybridLinearKVPool", "HybridReqToTokenPool", "MambaPool"), "memory_pool")
OF_SEVERAL["SWAKVPool"] = "swa_memory_pool"
SAYS = "sglang-moe-patches: kv-sizing: "


NO_STORES = {
    *("enable_dp_attention", "enable_kv_cache_events", "enable_metrics", "enable_session_radix_cache"),
    "enable_streaming_session",
}
"""Arguments that schedulers look at there, and that hold no prompts after a flush."""


@pytest.mark.every_release
@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize("eagle", [True, False])
def test_a_server_that_speculates_finds_as_much_of_a_prefix_as_a_phase_waits_for(eagle, page):
    """The engine's cache has pairs of tokens for EAGLE's keys, and single tokens for other algorithms."""
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

    limits = phases.Limits(2048, 8192, 40_000, 9, 0, page, draft_tokens=4, draft_slots=8)
    driven = {phase.kind: phase for phase in phases.derive_phases(limits).phases}
    *_, prefix, behind = driven[phases.PhaseKind.BEHIND_PREFIX].prompts(phases.Tokens("behind", 1000))
    _, *sharing = driven[phases.PhaseKind.SHARED_PREFIX].prompts(phases.Tokens("shared", 1000))
    cache = RadixCache(
        CacheInitParams(
            disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=None, page_size=page, is_eagle=eagle
        )
    )

    def key(tokens):
        return RadixKey(array("q", tokens), None)

    cache.insert(InsertParams(key=key(prefix), value=torch.arange(len(prefix))))

    def found(prompt):
        match = cache.match_prefix(MatchPrefixParams(key=key(prompt)))
        return match.device_prefix_len if hasattr(match, "device_prefix_len") else len(match.device_indices)

    bound = driven[phases.PhaseKind.BEHIND_PREFIX].bound
    assert found(behind) >= bound.longest_prefix > limits.input_tokens // 2
    assert len(behind) - found(behind) >= bound.tokens == limits.chunk
    bound = driven[phases.PhaseKind.SHARED_PREFIX].bound
    assert sum(map(found, sharing)) >= bound.prefix
    assert limits.chunk >= sum(map(len, sharing)) - sum(map(found, sharing)) >= bound.tokens


@pytest.mark.every_release
@pytest.mark.parametrize("kind", [phases.PhaseKind.PENALTIES, phases.PhaseKind.PREFILL])
def test_a_request_asks_for_all_that_its_phase_is_about(kind):
    """Whatever a release calls it, and whatever it leaves out by itself."""
    limits = phases.Limits(2048, 8192, 40_000, 9, 0, stop_token=True)
    phase = next(each for each in phases.derive_phases(limits).phases if each.kind is kind)
    tokenizer = SimpleNamespace(eos_token_id=1, additional_stop_token_ids=None)
    made = rehearsal.make_request("a name", [7, 8, 9], 5, phase, tokenizer=tokenizer)
    params = made.sampling_params
    assert (made.rid, list(made.input_ids), params.max_new_tokens, params.ignore_eos) == ("a name", [7, 8, 9], 5, True)
    assert made.return_logprob is phase.output_logprobs is (kind is phases.PhaseKind.PENALTIES)
    assert {name: getattr(params, name) for name in phase.sampling} == phase.sampling


def arguments() -> set[str]:
    """The names of this release's server arguments."""
    from sglang.srt.server_args import ServerArgs

    return set(getattr(ServerArgs, "__struct_fields__", None) or ServerArgs.__dataclass_fields__)


def asked(*reasons: eligibility.Reasons) -> set[str]:
    """The arguments by which servers are recognized that a record does not size."""

    class Asked(dict):
        def get(self, name, default=None):
            names.add(name)
            return super().get(name, default)

    names: set[str] = set()
    for applies, _ in (each for table in reasons for each in table.values()):
        applies(Asked(speculative_algorithm="EAGLE", attn_dp_size=2))
    return names


@pytest.mark.every_release
def test_each_argument_that_kv_sizing_reads_is_one_of_the_engines():
    """Or a server that has it would never be recognized."""
    names = asked(eligibility.MONITOR_ONLY, eligibility.INELIGIBLE) | set(fingerprint.VOLATILE)
    assert names - arguments() <= unsized_servers.ABSENT_FROM_SOME_RELEASES


@pytest.mark.every_release
def test_every_store_of_prompts_that_a_scheduler_may_make_is_named():
    """By what its code asks when it chooses its cache of prefixes: a flush does not empty what outlives the process."""
    if seen.has_module("sglang.srt.mem_cache.registry"):
        registry = seen.module("sglang.srt.mem_cache.registry")
        chooses = [registry.default_radix_cache_factory, registry.create_tree_cache]
    else:
        chooses = [seen.module("sglang.srt.managers.scheduler").Scheduler.init_cache_with_memory_pool]
    names = {name for name in arguments() if any(seen.mentions(each, name) for each in chooses)}
    stores = {name for name in names if name.startswith("enable_") or name.endswith("_backend")}
    assert "enable_lmcache" in stores
    assert stores - asked(eligibility.INELIGIBLE) <= NO_STORES


@pytest.mark.every_release
def test_the_largest_captured_decode_is_read_from_the_releases_own_settings():
    if not seen.has_module("sglang.srt.model_executor.cuda_graph_config"):
        assert "cuda_graph_max_bs" in arguments()
        assert phases._asked_to_capture({"cuda_graph_max_bs": 48}) == 48
        return
    graphs = seen.module("sglang.srt.model_executor.cuda_graph_config")
    for backend, largest in ((graphs.Backend.FULL, 48), (graphs.Backend.DISABLED, 0)):
        config = graphs.CudaGraphConfig(decode=graphs.PhaseConfig(backend=backend, max_bs=48))
        for told in (config, asdict(config)):  # a server's own, and what it tells of itself
            assert phases._asked_to_capture({"cuda_graph_config": told}) == largest


NEVER_SHOWN = {
    # Made before a rehearsal, and a clock by which arrivals are told apart.
    *("kv_cache_allocation_time", "processed_tokens_counter", "_prefill_decode_interval_remaining"),
    # Of a profile that somebody has begun, and of a test of the engine's.
    *("profiler_prefill_ct", "profiler_decode_ct", "_test_stream_output_count"),
    # What the log, or a message, says of the time since the last one.
    *("_device_timer_window_batch_count", "_device_timer_window_gpu_time"),
    *("_mfu_log_flops", "_mfu_log_read_bytes", "_mfu_log_write_bytes", "_fpm_gpu_time_acc"),
}
"""What a scheduler adds to, and neither tells of itself nor goes by afterwards."""


def added_to(kind: type) -> set[str]:
    """The attributes of its own, or of what reports metrics, that the engine's code of a class adds to."""
    trees = [ast.parse(textwrap.dedent(inspect.getsource(each))) for each in kind.__mro__ if each is not object]
    return {
        node.target.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute)
        if ast.unparse(node.target.value) in ("self", "self.metrics_reporter")
    }


@pytest.mark.every_release
def test_whatever_a_scheduler_counts_is_as_before_after_a_rehearsal():
    schedulers = [seen.module("sglang.srt.managers.scheduler").Scheduler]
    components = "sglang.srt.managers.scheduler_components."
    if seen.has_module(f"{components}metrics_reporter"):
        schedulers.append(seen.module(f"{components}metrics_reporter").SchedulerMetricsReporter)
        schedulers.append(seen.module(f"{components}batch_result_processor").SchedulerBatchResultProcessor)
    names = {name for kind in schedulers for name in added_to(kind) if not name.startswith("spec_")}
    assert {"forward_ct", "num_generated_tokens"} <= names
    assert names - NEVER_SHOWN <= set(rehearsal.COUNTERS)


@pytest.mark.every_release
def test_the_first_decode_after_a_rehearsal_is_counted_as_a_servers_first():
    """Releases that sum up the time between two decodes have none before the first."""
    scheduler = seen.module("sglang.srt.managers.scheduler").Scheduler
    if not hasattr(scheduler, "_record_step_counters"):
        assert not seen.mentions(scheduler.__init__, "decode_moment_totals")
        return
    decode_mode = seen.module("sglang.srt.model_executor.forward_batch_info").ForwardMode.DECODE
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

    run = rehearsal.Rehearsal(made, 0, print, None, leads=False)
    run._keep_counters()
    assert [decode(at_s) for at_s in (0.1, 0.2, 0.3)] == [0, 1, 2]
    run.end()
    assert [decode(at_s) for at_s in (0.4, 0.5)] == [0, 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("kv")
    plugins.write_module(made / "plugin", "tells_memory", STAND_INS)
    plugins.write_module(made / "plugin", "has_pools", POOLS)
    return made


def sized(name: str, model: Path, folder: Path, *arguments: str, **variables: str) -> Server:
    """A server that sizes its KV cache, with the stand-ins; its records are in ``folder``."""
    given = {"SGLANG_MOE_PATCHES_KV_SIZING": "auto", "SGLANG_MOE_PATCHES_KV_RECORD": str(folder / "records.json")}
    path = {"PYTHONPATH": on_path(str(folder.parent / "plugin"))}
    return server(name, model, folder, *SMALL, *arguments, **{**given, **path, **variables})


def info(running: Server) -> dict[str, Any]:
    return httpx.get(f"{running.url}/get_server_info", timeout=PATIENCE).raise_for_status().json()


def said(running: Server) -> list[str]:
    """What kv-sizing has said."""
    return [line.partition(SAYS)[2] for line in running.log_text().splitlines() if SAYS in line]


def the_record(folder: Path) -> record.Record:
    (found,) = record.read(folder / "records.json").values()
    return found


def samples(metrics: str) -> list[list[str]]:
    """Name and value of each line that Prometheus reads, without its process."""
    lines = [re.sub(r',?pid="\d+"', "", line) for line in metrics.splitlines() if not line.startswith("#")]
    return [line.rsplit(" ", 1) for line in lines]


UNALIKE = re.compile(
    r"port$|launch_command|ts_tic|timestamp|created|modified_at|seconds|throughput|(startup|load_weights)_time"
    r"|available_gpu_memory|startup_available|busy_us|endpoint=\"/health\"|decode_moments [24]"
    r"|_cuda_graph_config_locked"
)
"""What differs between two stock servers: where they listen, when and how fast something was (of the sums over decode
steps the third and the fifth), and of the machine's memory what is free; how often a starting server was asked whether
it is ready, and in what order it lists a set."""


def leaves(name: str, value: Any) -> Iterator[tuple[str, object]]:
    """The plain values in a value of JSON, each by its path."""
    nested = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if nested is None:
        yield name, value
    else:
        for key, each in nested:
            yield from leaves(f"{name} {key}", each)


def everything(running: Server) -> dict[str, object]:
    """What a server answers wherever it is asked by GET, and its metrics, but for what is :data:`UNALIKE`."""
    once = httpx.Limits(max_keepalive_connections=0)  # a connection that is kept may be closed under a slow answer
    with httpx.Client(base_url=running.url, timeout=PATIENCE, follow_redirects=True, limits=once) as client:
        endpoints = client.get("/openapi.json").raise_for_status().json()["paths"]
        found: dict[str, object] = {f"{path} takes": sorted(methods) for path, methods in endpoints.items()}
        for path, methods in endpoints.items():
            # What takes POST as well does something; what has a parameter is no one page.
            if "get" in methods and "post" not in methods and "{" not in path:
                answer = client.get(path)
                is_json = "json" in answer.headers.get("content-type", "")
                found |= leaves(path, {"status": answer.status_code, "says": answer.json() if is_json else answer.text})
        found |= samples(client.get("/metrics").raise_for_status().text)
    return {name: value for name, value in found.items() if not UNALIKE.search(name)}


@dataclass(frozen=True)
class Alike:
    """What a server answered, says of itself, and what kv-sizing said."""

    answers: list[list[int]]
    tells: dict[str, object]
    said: list[str]


LIMITED = ["--max-total-tokens", "2000", "--max-queued-requests", "1", "--prefill-max-requests", "1"]


def with_limits(name: str, model: Path, folder: Path, **variables: str) -> Server:
    """The same, with limits of the user's and the cache of prefixes: a rehearsal drops some, and counts them."""
    made = sized(name, model, folder, *LIMITED, "--random-seed", "1", "--enable-metrics", **variables)
    made._arguments.remove("--disable-radix-cache")
    return made


@pytest.fixture(scope="module")
def alike(folder: Path, checkpoint) -> dict[str, Alike]:
    """By their names: servers that are to be as stock. The record of the one that rehearses is in ``alike``."""
    place = folder / "alike"
    place.mkdir()
    variables = {"stock": {"SGLANG_MOE_PATCHES": "none"}, "rehearsed": {}}
    if RELEASE == DEFAULT:  # the same whatever the release: nothing of kv-sizing runs; no record can be written
        (place / "file").write_text("no folder")
        variables["unset"] = {eligibility.KV_SIZING.name: ""}
        variables["unwritable"] = {eligibility.KV_RECORD.name: str(place / "file" / "records.json")}
    servers = [with_limits(name, checkpoint(), place, **more) for name, more in variables.items()]
    with started(*servers):
        every = answers(*servers)
        return {
            each.name: Alike(answered, everything(each), said(each))
            for each, answered in zip(servers, every, strict=True)
        }


@pytest.mark.every_release
def test_a_server_says_and_counts_what_stock_does_without_the_variable_and_after_a_rehearsal(alike: dict[str, Alike]):
    stock = alike["stock"]
    assert {"/server_info status", "/v1/models status"} <= set(stock.tells)
    for name, other in alike.items():
        assert other.answers == stock.answers
        ours = {metric for metric in other.tells if metric.startswith(metrics.PREFIX)}
        assert bool(ours) == bool(other.said) == (name in ("rehearsed", "unwritable"))
        assert {metric: value for metric, value in other.tells.items() if metric not in ours} == stock.tells
    assert "rehearsed in" in alike["rehearsed"].said[-1]
    assert RELEASE != DEFAULT or re.match("no rehearsal: .* cannot be written", alike["unwritable"].said[-1])


@pytest.mark.every_release
def test_limits_of_the_users_are_used_and_rehearsed_once(
    folder: Path, checkpoint, alike: dict[str, Alike], monkeypatch
):
    """A queue of one would refuse most requests of a rehearsal."""
    measured = the_record(folder / "alike")
    assert (measured.missed, measured.rehearsals, measured.tokens <= 2000) == ((), 1, True)
    second = with_limits("second", checkpoint(), folder / "alike")
    with started(second):
        assert sure(second) == {name: alike["stock"].tells[f"/server_info says {name}"] for name in SURE}
    (told,) = said(second)
    assert "--max-total-tokens 2,000 is used; " in told
    assert "would fit" in told
    monkeypatch.setattr(sizing.LaunchMemory, "margin", MARGIN)  # the stand-in's
    assert told.endswith(kv_records.advice(measured)["next_start"])


SURE = ("mem_fraction_static", "max_total_num_tokens")


def sure(running: Server) -> dict[str, float]:
    """The fraction and the tokens in force."""
    found = info(running)
    return {name: found[name] for name in SURE}


@pytest.mark.compatibility
def test_a_first_start_measures_and_a_second_one_serves_more(folder: Path, checkpoint, engine):
    place = folder / "twice"
    place.mkdir()
    first = sized("first", checkpoint(), place)
    # Stock is this process, which takes no imports, where an answer does not depend on how its prefill is cut.
    here = RELEASE == DEFAULT
    stock = [] if here else [server("stock", checkpoint(), place, *SMALL, SGLANG_MOE_PATCHES="none")]
    with started(first, *stock):
        assert "rehearsed in" in said(first)[-1]  # it is ready, and was not before
        if here:
            model = engine.load(checkpoint())
            expected = [[engine.generate(model, [prompt], 7)[0][0] for prompt in PROMPTS]]
        else:
            expected = answers(*stock, prompts=PROMPTS)
        assert answers(first, prompts=PROMPTS) == expected
        rule = sure(first)
    log = first.log_text()
    assert log.index("rehearsed in") < log.index("The server is fired up")
    measured = the_record(place)
    assert (measured.missed, measured.proven, measured.attempts) == ((), False, 0)
    assert {"prefill chunk", "prompts of many lengths"} <= set(measured.reached)
    assert any("penalties" in name for name in measured.reached)
    assert measured.rule_fraction == rule["mem_fraction_static"]
    assert measured.rule_tokens == measured.tokens == rule["max_total_num_tokens"]
    reserve = measured.before * (1 - measured.rule_fraction)
    assert measured.need == pytest.approx(reserve - FREE, abs=1)

    second = sized("second", checkpoint(), place, "--enable-metrics")
    with started(second):
        assert answers(second, prompts=PROMPTS) == answers(second, prompts=PROMPTS)
        larger = sure(second)
        shown = httpx.get(f"{second.url}/metrics", follow_redirects=True, timeout=PATIENCE).raise_for_status().text
    found = {name: float(value) for name, value in samples(shown)}
    rank = 'gpu="0",rank="0"'
    assert found[f"{metrics.LOWEST_FREE}{{{rank}}}"] == FREE
    for name in (metrics.FRACTION, metrics.SUGGESTED):
        assert found[f"{name}{{{rank}}}"] == pytest.approx(larger["mem_fraction_static"], abs=1e-9)
    assert found[f'{metrics.STATE}{{{rank},reason="",source="record"}}'] == 1
    assert larger["max_total_num_tokens"] > rule["max_total_num_tokens"]
    assert larger["mem_fraction_static"] == pytest.approx(
        1 - (measured.need + MARGIN) / measured.before, abs=2 * sizing.FRACTION_STEP
    )
    told = said(second)[0]
    for part in (
        f"{larger['mem_fraction_static']:.4f} instead of {rule['mem_fraction_static']:.4f}",
        f"{larger['max_total_num_tokens']:,} tokens instead of {rule['max_total_num_tokens']:,}",
        "200 MB of margin, measured",
        "rehearses once more",
    ):
        assert part in told
    proven = the_record(place)
    assert proven.proven
    assert proven.need == measured.need
    assert proven.lowest_free_serving == FREE


def watched(running: Server) -> list[tuple[str, str]]:
    """While the server starts, what ``/health`` answers within five seconds, and the log's text thereafter."""
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
def test_a_server_that_rehearses_is_starting_by_its_health(folder, checkpoint):
    place = folder / "skips"
    place.mkdir()
    skips = sized("skips", checkpoint(), place, "--skip-server-warmup")
    answered = watched(skips)
    with started(skips):
        answers(skips, prompts=PROMPTS)
    log = skips.log_text()
    assert log.index("rehearsed in") < log.index("The server is fired up")
    before = [(answer, text) for answer, text in answered if "rehearsed in" not in text]
    assert "503" in {answer for answer, text in before if "rehearses the largest" in text}
    assert {answer for answer, _ in before} <= {"503", "ConnectError"}  # the engine's own, at once; or no port yet


@DEFAULT_ENGINE_ONLY
def test_a_rehearsal_ends_within_the_engines_limit(folder, checkpoint):
    place, limit_s = folder / "limited", 40
    place.mkdir()
    # Half the limit is over before the last of the longest prefix's 511 chunks, each of which is a turn at least. Were
    # they one prompt, the engine would still compute it when its own first request is to be answered.
    late = {"SGLANG_WARMUP_TIMEOUT": str(limit_s), "SLOW_S": "0.05"}
    limited = sized("limited", checkpoint(max_position=32_768), place, "--context-length", "32768", **late)
    limited._arguments.remove("--disable-radix-cache")
    with started(limited):
        answers(limited, prompts=PROMPTS)
    told = r"rehearsed in (\d+) s: .*; out of time, .*; not reached: .*prefill chunk behind the longest prefix, "
    ended = re.search(told, said(limited)[-1])
    assert ended is not None
    # Earlier than half of it where a part takes so long on this machine that the next may not end in time.
    assert int(ended[1]) <= limit_s * 3 / 4


@DEFAULT_ENGINE_ONLY
def test_a_sized_server_that_is_killed_while_it_captures_does_not_try_the_same_again(folder: Path, checkpoint):
    """As an orchestrator starts it again and again."""
    place = folder / "crashes"
    place.mkdir()

    def start(name: str, **variables: str) -> str:
        running = sized(name, checkpoint(), place, MARGIN="50000000", **variables)
        with started(running):
            answers(running, prompts=PROMPTS)
        return said(running)[0]

    start("first")
    fractions = []
    for name in ("second", "third"):
        with pytest.raises(ServerFailed):
            start(name, KILLED="1")
        told = said(Server("", [], {}, place / f"{name}.log"))[0]
        fractions.append(float(told.split()[0]))
    assert fractions[0] > fractions[1] > the_record(place).rule_fraction
    assert "2 starts with the record's fraction ended before they served" in start("fourth")


@pytest.mark.product
@pytest.mark.every_release
def test_a_start_by_a_record_does_what_doctor_says_of_it(folder: Path, checkpoint, monkeypatch):
    """As measured, but for what each record says; what other processes hold meanwhile doctor cannot know."""
    place = folder / "by record"
    place.mkdir()
    with started(sized("first", checkpoint(), place)):
        pass
    ((key, measured),) = record.read(place / "records.json").items()
    held = int(2 * sizing.MAX_FOREIGN_MEMORY_DRIFT * measured.total)
    records = {
        "missed": replace(measured, missed=("mixed chunk",), rehearsals=sizing.MAX_INCOMPLETE_REHEARSALS),
        "no gain": replace(measured, need=measured.reserve - MARGIN - 1_000_000),
        "others": replace(measured, total=measured.total + held),
        "half": None,
    }
    files = {name: folder / f"by record, {name}" / "records.json" for name in records}
    for name, new in records.items():
        file = files[name]
        file.parent.mkdir()
        file.write_text('{"format": 1, "records": {"a')
        if new is not None:
            record.update(file, key, lambda old, new=new: new)
    servers = {name: sized(name, checkpoint(), files[name].parent) for name in records}
    monkeypatch.setattr(sizing.LaunchMemory, "margin", MARGIN)  # the stand-in's
    foreseen = {}
    for name in records:
        monkeypatch.setenv(eligibility.KV_RECORD.name, str(files[name]))
        try:
            foreseen[name] = kv_records.json_report()["records"][key]["next_start"]
        except ValueError as error:
            foreseen[name] = str(error)
    with started(*servers.values()):
        told = {name: said(running)[0] for name, running in servers.items()}
    assert "did not reach: mixed chunk" in foreseen["missed"]
    assert "less than 2 %" in foreseen["no gain"]
    assert "is not whole JSON" in foreseen["half"]
    for name in ("missed", "no gain", "half"):
        assert f": {foreseen[name]}" in told[name]
    assert foreseen["others"].startswith("sized by it")
    assert f": other processes hold {(measured.total - measured.before) / 1e6:,.0f} MB of the GPU" in told["others"]


@pytest.mark.every_release
def test_the_pools_that_are_known_are_the_engines():
    pools = {name: getattr(seen.module(f"sglang.srt.mem_cache.{module}"), name) for name, module in OF_SEVERAL.items()}
    for name in facts.REHEARSED:
        assert seen.sets(pools[name].__init__, "mem_usage")
    assert seen.sets(pools["SWAKVPool"].__init__, "size_swa")
    assert "mamba_pool" in seen.source(pools["HybridReqToTokenPool"])
    assert seen.sets(pools["MambaPool"].__init__, "mem_usage")
    assert facts.hybrid(pools["SWAKVPool"].__new__(pools["SWAKVPool"]), None) == facts.WINDOWS


SEES = SimpleNamespace(num_hidden_layers=27, hidden_size=1152)


@pytest.mark.every_release
@pytest.mark.parametrize(("vision", "factor"), [(SEES, 0.9097), (SimpleNamespace(), 0.95), (None, 1.0)])
def test_what_the_rule_keeps_for_images_is_asked_of_it(vision, factor: float, monkeypatch):
    config = SimpleNamespace(hf_config=SimpleNamespace(vision_config=vision))
    assert images.factor(config) == pytest.approx(factor, abs=1e-4)
    for name, cache in (("", 100), ("4096", 4096)):
        monkeypatch.setenv("SGLANG_VLM_CACHE_SIZE_MB", name)
        if not name:
            monkeypatch.delenv("SGLANG_VLM_CACHE_SIZE_MB")
        assert images.cache_gib({}) == cache / 1024


def asked_about_images(running: Server) -> list[Any]:
    """Tokens and log-probabilities of answers to two images, and to both at once."""
    shown = [image_model.picture(96, 128), image_model.picture(200, 64)]
    found = []
    for some in ([shown[0]], [shown[1]], shown):
        body = {"text": kinds.IMAGE * len(some) + "What is this?", "image_data": some, "return_logprob": True}
        body["sampling_params"] = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        answer = httpx.post(f"{running.url}/generate", json=body, timeout=PATIENCE).raise_for_status().json()
        found.append((answer["output_ids"], answer["meta_info"]["output_token_logprobs"]))
    return found


@DEFAULT_ENGINE_ONLY
def test_a_server_that_takes_images_is_sized_beside_what_the_rule_keeps_for_them_and_answers_as_stock(folder: Path):
    place = folder / "images"
    place.mkdir()
    model, weights = image_model.write(place / "model"), dummy_weights.write_plugin(place / "weights")
    path = on_path(*map(str, [folder / "plugin", *weights]))

    def taking_images(name: str, **variables: str) -> Server:
        made = sized(name, model, place, "--load-format", "dummy", PYTHONPATH=path, **variables)
        made._arguments[made._arguments.index(ROUTED)] = "triton"
        for argument in ("--quantization", "modelopt_fp4"):
            made._arguments.remove(argument)
        return made

    stock, first = taking_images("stock", SGLANG_MOE_PATCHES="none"), taking_images("first")
    with started(stock, first):
        expected = asked_about_images(stock)
        assert asked_about_images(stock) == asked_about_images(first) == expected
        rule = info(first)["max_total_num_tokens"]
    assert expected[0] != expected[1]
    (key, measured) = next(iter(record.read(place / "records.json").items()))
    assert measured.missed == ()
    # As much more is free as images may take, with the margin and what goes to the KV cache.
    need = int(measured.reserve) - measured.images - MARGIN - 300_000_000
    record.update(place / "records.json", key, lambda old: replace(old, need=need, serving_peak_need=0))
    second = taking_images("second", FREE=str(measured.images + MARGIN))
    with started(second):
        assert asked_about_images(second) == expected
        larger = info(second)
    assert larger["max_total_num_tokens"] > rule
    assert larger["mem_fraction_static"] == pytest.approx(
        1 - (need + measured.images + MARGIN) / measured.before, abs=2 * sizing.FRACTION_STEP
    )
    assert f"{measured.images / 1e6:,.0f} MB the engine's for images" in said(second)[0]
    proven = the_record(place)
    assert (proven.missed, proven.proven) == ((), True)
    assert proven.need == pytest.approx(need, abs=measured.before * 2 * sizing.FRACTION_STEP)


def with_pools(name: str, model: Path, folder: Path, pools: str, *arguments: str, **variables: str) -> Server:
    """The same, whose model is kept in pools of more than one kind, with the cache of prefixes."""
    made = sized(name, model, folder, *arguments, POOLS=pools.split()[0], **variables)
    made._arguments.remove("--disable-radix-cache")
    return made


# 0.5.11 admits nobody until a request has ended, once it had no window for one: there the rule would stand.
FEW_WINDOWS = "0.1" if RELEASE == "0.5.11" else "0.01"
KINDS = {
    # So few tokens of sliding windows that they bound what runs at once, and how long.
    "windows": (["--max-running-requests", "40", "--swa-full-tokens-ratio", FEW_WINDOWS], {}),
    # Requests follow the states that there is room for.
    "states": (["--max-running-requests", "64"], {"NEED": "20000000"}),
}
if RELEASE == DEFAULT:
    TRACKED = ["--mamba-scheduler-strategy", "extra_buffer"]
    KINDS["states that are tracked"] = (KINDS["states"][0] + TRACKED, KINDS["states"][1])


@pytest.mark.product
@pytest.mark.every_release
@pytest.mark.parametrize("pools", KINDS)
def test_a_server_with_pools_of_more_than_one_kind_is_rehearsed_and_sized(pools: str, folder: Path, checkpoint):
    place = folder / pools
    place.mkdir()
    arguments, variables = KINDS[pools]
    model = checkpoint(family="qwen3-moe")
    found = []
    for name in ("first", "second"):
        running = with_pools(name, model, place, pools, *arguments, **variables)
        with started(running):
            assert answers(running, prompts=PROMPTS) == answers(running, prompts=PROMPTS)
            found.append((info(running), the_record(place)))
    (rule, measured), (larger, proven) = found
    assert (measured.missed, measured.skipped, measured.proven) == ((), (), False)
    assert {"prefill chunk behind the longest prefix", "8 requests behind one prefix"} <= set(measured.reached)
    assert (proven.missed, proven.proven) == ((), True)
    assert larger["mem_fraction_static"] > rule["mem_fraction_static"]
    assert larger["max_total_num_tokens"] > rule["max_total_num_tokens"]
    requests = [each["internal_states"][0]["effective_max_running_requests_per_dp"] for each in (rule, larger)]
    assert measured.requests_grow == (requests[1] > requests[0]) == (pools != "windows")
    assert f"eager decode of {requests[1]} requests" in proven.reached


@pytest.mark.product
@DEFAULT_ENGINE_ONLY
def test_two_ranks_rehearse_in_step_and_where_one_fails_both_serve_by_the_rule(folder: Path, checkpoint):
    place, other = folder / "ranks", folder / "a rank fails"
    place.mkdir()
    other.mkdir()
    good = sized("good", checkpoint(), place, "--tp", "2")
    bad = sized("bad", checkpoint(), other, "--tp", "2", FAILS_ON_RANK="1")
    with started(good, bad):
        assert answers(good, prompts=PROMPTS) == answers(bad, prompts=PROMPTS)
        assert sure(good) == sure(bad)
    assert "rehearsed in" in said(good)[-1]
    measured = the_record(place)
    assert len(measured.ranks) == 2
    assert measured.missed == ()
    assert said(bad)[-1] == (
        "the rehearsal failed, and nothing is recorded: rank 1: RuntimeError: the driver does not answer"
    )
    failed = the_record(other)
    assert (failed.need, failed.attempts) == (0, 1)


def with_attention_ranks(name: str, model: Path, folder: Path, **variables: str) -> Server:
    """Two ranks of data-parallel attention, with the cache of prefixes; what each ran is in ``folder / name``."""
    plugins.write_module(folder / name / "gathers", "gathers_on_cpu", GATHERS)
    path = on_path(str(folder / name / "gathers"), str(folder.parent / "plugin"))
    given = ["--tp", "2", "--dp-size", "2", "--enable-dp-attention", "--max-running-requests", "20"]
    given += ["--chunked-prefill-size", "256"]
    (folder / name / "steps").mkdir()
    variables |= {"PYTHONPATH": path, "STEPS": str(folder / name / "steps")}
    made = sized(name, model, folder / name, *given, **variables)
    made._arguments.remove("--disable-radix-cache")
    return made


def ran(folder: Path) -> list[list[list[str]]]:
    """Of both ranks, what each forward of the rehearsal was: mode, tokens, requests, tokens of data-parallel ranks."""
    return [[line.split() for line in (folder / "steps" / rank).read_text().splitlines()] for rank in "01"]


def two_starts(begin: Callable[..., Server], place: Path) -> tuple[record.Record, dict[str, Any]]:
    """Of a server of two ranks, beside one whose second rank fails.

    :param begin: makes a server from its name and variables, in a folder of that name in ``place``.
    :returns: what was measured, and what the second start says of itself.
    """
    first, bad = begin("first"), begin("bad", FAILS_ON_RANK="1")
    with started(first, bad):
        expected = answers(first, prompts=PROMPTS)
        assert answers(bad, prompts=PROMPTS) == expected
        rule, failed = info(first), info(bad)
    measured, not_measured = (the_record(place / name) for name in ("first", "bad"))
    assert (measured.missed, len(measured.ranks), measured.unfinished) == ((), 2, ())
    assert {"prefill chunk behind the longest prefix", "8 requests behind one prefix"} <= set(measured.reached)
    assert "eager decode of 10 requests" in measured.reached
    told = "the rehearsal failed, and nothing is recorded: rank 1: RuntimeError: the driver does not answer"
    assert said(bad)[-1] == told
    assert (not_measured.need, not_measured.attempts) == (0, 1)
    assert failed["max_total_num_tokens"] == rule["max_total_num_tokens"] == measured.rule_tokens

    (place / "second").mkdir()
    (place / "second" / "records.json").write_text((place / "first" / "records.json").read_text())
    second = begin("second")
    with started(second):
        assert answers(second, prompts=PROMPTS) == expected
        larger = info(second)
    assert larger["max_total_num_tokens"] > rule["max_total_num_tokens"]
    assert phases.fraction_in_force(larger) > phases.fraction_in_force(rule) == measured.rule_fraction
    assert the_record(place / "second").proven
    for name in ("first", "second"):
        one, other = ran(place / name)
        assert one == other
    return measured, larger


@pytest.mark.product
@pytest.mark.every_release
def test_ranks_of_data_parallel_attention_rehearse_in_step_and_are_sized_alike(folder: Path, checkpoint):
    place = folder / "attention"
    _, larger = two_starts(lambda name, **more: with_attention_ranks(name, checkpoint(), place, **more), place)
    steps, _ = ran(place / "first")
    assert "IDLE" not in {mode for mode, *_ in steps}
    # Half of the 256 tokens of a chunk, and of the 20 requests, on each.
    assert ["EXTEND", "128", "1", "256"] in steps
    assert ["DECODE", "10", "10", "20"] in steps
    assert {each["memory_usage"]["token_capacity"] for each in larger["internal_states"]} == {
        larger["max_total_num_tokens"]
    }


@pytest.mark.product
@pytest.mark.every_release
def test_replicas_rehearse_each_for_itself_into_one_record(folder: Path, checkpoint):
    place = folder / "replicas"
    place.mkdir()
    first = sized("first", checkpoint(), place, "--dp-size", "2")
    stock = server("stock", checkpoint(), place, *SMALL, "--dp-size", "2", SGLANG_MOE_PATCHES="none")
    with started(first, stock):
        expected = answers(stock, prompts=PROMPTS)
        assert answers(first, prompts=PROMPTS) == expected
        assert len([line for line in said(first) if "rehearsed in" in line]) == 2
        rule = info(first)
    measured = the_record(place)
    assert (measured.missed, measured.unfinished, measured.need > 0) == ((), (), True)

    second = sized("second", checkpoint(), place, "--dp-size", "2")
    with started(second):
        assert answers(second, prompts=PROMPTS) == expected
        larger = info(second)
    assert len([line for line in said(second) if " tokens instead of " in line]) == 2
    assert phases.fraction_in_force(larger) > phases.fraction_in_force(rule) == measured.rule_fraction
    # Those of the same controller: which of them is asked first is the engine's choice.
    tokens = {each["memory_usage"]["token_capacity"] for each in larger["internal_states"]}
    assert tokens == {larger["max_total_num_tokens"]}
    assert larger["max_total_num_tokens"] > rule["max_total_num_tokens"]
    assert the_record(place).proven


def of_two_stages(name: str, model: Path, folder: Path, **variables: str) -> Server:
    """With the cache of prefixes; what each stage ran is in ``folder / name``."""
    (folder / name / "steps").mkdir(parents=True)
    given = ["--pp-size", "2", "--max-running-requests", "20", "--chunked-prefill-size", "128"]
    path = on_path(str(folder.parent / "plugin"))
    made = sized(name, model, folder / name, *given, PYTHONPATH=path, STEPS=str(folder / name / "steps"), **variables)
    made._arguments.remove("--disable-radix-cache")
    return made


@pytest.mark.product
@pytest.mark.every_release
def test_stages_of_a_pipeline_rehearse_the_same_and_are_sized_alike(folder: Path, checkpoint):
    place = folder / "stages"
    measured, _ = two_starts(lambda name, **more: of_two_stages(name, checkpoint(), place, **more), place)
    assert "decode of one long request among 9 short ones" in measured.reached
    steps, _ = ran(place / "first")
    assert ["EXTEND", "128", "1", "128"] in steps
    # Half of the 20 requests: the others are in the other batch.
    assert ["DECODE", "10", "10", "10"] in steps


def of_two_machines(name: str, model: Path, folder: Path) -> list[Server]:
    """A server of two ranks, each on a machine with a record of its own, in ``folder / (name + its number)``."""
    given = ["--tp", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}", "--node-rank"]
    places = [folder / f"{name}{rank}" for rank in range(2)]
    for place in places:
        place.mkdir()
    return [sized(name, model, place, *given, str(rank)) for rank, place in enumerate(places)]


@pytest.mark.product
@pytest.mark.every_release
def test_two_machines_are_sized_by_the_record_of_the_first(folder: Path, checkpoint):
    found = []
    for start in ("first", "second"):
        one, other = of_two_machines(start, checkpoint(), folder)
        if start == "second":
            for rank in "01":
                records = folder / f"first{rank}" / "records.json"
                (folder / f"second{rank}" / "records.json").write_text(records.read_text())
        with started(one, other):
            found.append((answers(one, prompts=PROMPTS), sure(one), said(one)))
            assert said(other) == []
    (expected, rule, told), (same, larger, _) = found
    assert same == expected
    assert "rehearsed in" in told[-1]
    measured, seen = (the_record(folder / f"first{rank}") for rank in "01")
    assert (measured.missed, len(measured.ranks), measured.unfinished) == ((), 2, ())
    assert (seen.need, seen.lowest_free_serving, seen.fingerprint_inputs) == (0, FREE, measured.fingerprint_inputs)
    assert larger["max_total_num_tokens"] > rule["max_total_num_tokens"] == measured.rule_tokens
    assert the_record(folder / "second0").proven


@pytest.mark.product
@pytest.mark.every_release
@pytest.mark.parametrize("without", ["0", "1"])
def test_where_a_machine_does_not_take_part_nobody_waits_for_it(without: str, folder: Path, checkpoint):
    one, other = of_two_machines(f"without{without}", checkpoint(), folder)
    lacks, has = (one, other) if without == "0" else (other, one)
    lacks.environment["SGLANG_MOE_PATCHES_KV_SIZING"] = "off"
    with started(one, other):
        answers(one, prompts=PROMPTS)
    assert said(lacks) == []
    why = "of --nnodes, not all of whose machines have said within 15 s that they have SGLANG_MOE_PATCHES_KV_SIZING"
    (told,) = said(has)
    assert why in told
    kept = the_record(has.log.parent)
    assert (kept.need, kept.reached) == (0, ())
    # As the stand-in tells it at first, and later: it is saved once a minute.
    assert kept.lowest_free_serving in (FREE + 1_000_000_000, FREE)


@pytest.mark.product
@DEFAULT_ENGINE_ONLY
def test_whatever_is_wrong_with_the_record_a_server_starts_by_the_rule_and_says_why(folder: Path, checkpoint):
    half, closed, given, begun = (folder / name for name in ("half", "closed", "given", "begun"))
    for place in (half, closed, given, begun):
        place.mkdir()
    (half / "records.json").write_text('{"format": 1, "records": {"a')
    (closed / "file").write_text("no folder")
    nowhere, by_hand = str(closed / "file" / "records.json"), ("--mem-fraction-static", "0.91")
    servers = [
        sized("half", checkpoint(), half),
        sized("closed", checkpoint(), closed, SGLANG_MOE_PATCHES_KV_RECORD=nowhere),
        sized("given", checkpoint(), given, *by_hand, GIVEN="0.91"),
        sized("begun", checkpoint(), begun, *by_hand, GIVEN="0.91", SGLANG_MOE_PATCHES_KV_SIZING="always"),
    ]
    with started(*servers):
        first, *others = answers(*servers, prompts=PROMPTS)
        assert all(other == first for other in others)
        fractions = [sure(each)["mem_fraction_static"] for each in servers]
    assert fractions[0] == fractions[1] != fractions[2] == fractions[3] == 0.91
    told = [said(each) for each in servers]
    assert f"{half / 'records.json'} is not whole JSON; measuring during this start" in told[0][0]
    assert the_record(half).need
    assert (half / "records.json.unreadable").exists()
    assert told[1][-1].startswith(f"no rehearsal: {nowhere} cannot be written (")
    by_the_user = "using the given --mem-fraction-static 0.9100: "
    nothing_yet = "no record for this configuration; measuring during this start"
    assert told[2][0] == f"{by_the_user}it is used unchanged; {nothing_yet}"
    assert told[3][0] == f"{by_the_user}{nothing_yet}"
    assert the_record(given).rule_fraction == 0.91
    assert the_record(begun).rule_fraction == 0.91
