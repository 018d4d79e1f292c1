"""Functions for a rehearsal: read the sizes of batches and servers, make and drop requests, and mute metrics.

A *rehearsal* runs a server's largest forward passes before the first user's request.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sglang_moe_patches.core.patch import Patcher
from sglang_moe_patches.memory.kv_sizing.eligibility import arguments_of
from sglang_moe_patches.memory.kv_sizing.phases import Batch, Limits, Phase, ServerFacts, derive_limits
from sglang_moe_patches.memory.kv_sizing.planted_prefix import can_plant
from sglang_moe_patches.memory.kv_sizing.pools import GIB, hybrid_kind, pool_bytes, pools_of

METRICS = {"Counter": ("inc",), "Gauge": ("inc", "dec", "set"), "Histogram": ("observe",), "Summary": ("observe",)}
"""Methods that change a metric, by the name of the metric's class in ``prometheus_client``."""


# --- Facts -----------------------------------------------------------------------------------------------------------


def batch_facts(batch: Any) -> Batch:
    """Return the sizes of the engine's ``ForwardBatch``."""
    lengths = getattr(batch, "seq_lens_cpu", None)
    prefixes = _integers(getattr(batch, "extend_prefix_lens_cpu", None))
    gathered = _integers(getattr(batch, "global_num_tokens_cpu", None))
    return Batch(
        mode=batch.forward_mode.name,
        tokens=0 if batch.input_ids is None else int(batch.input_ids.shape[0]),
        requests=int(batch.batch_size),
        prefix=sum(prefixes),
        longest_prefix=max(prefixes, default=0),
        longest=0 if lengths is None or not len(lengths) else int(lengths.max()),
        all_ranks=sum(gathered),
    )


def _integers(values: Any) -> list[int]:
    return [] if values is None else [int(value) for value in values]


def server_facts(runner: Any) -> ServerFacts:
    """Return the facts of a model runner: pools, graphs and sizes, as far as this release has them."""
    pool, table = pools_of(runner)
    config = runner.model_config
    rows = getattr(table, "req_to_token", None)
    graphs = getattr(runner, "decode_cuda_graph_runner", None) or getattr(runner, "graph_runner", None)
    captured = getattr(graphs, "max_bs", None)
    # Read the allocator's number. The pool's own number counts all addresses, also those without memory.
    window_tokens = int(getattr(getattr(runner, "token_to_kv_pool_allocator", None), "size_swa", 0) or 0)
    return ServerFacts(
        fixed_bytes=(0 if rows is None else rows.nbytes) + pool_bytes(getattr(table, "mamba_pool", None)),
        page=int(getattr(runner, "page_size", None) or getattr(pool, "page_size", 1) or 1),
        vocabulary=int(config.vocab_size),
        hybrid=hybrid_kind(pool, table),
        window=int(getattr(runner, "sliding_window_size", 0) or 0) if window_tokens else 0,
        window_tokens=window_tokens,
        captured=None if captured is None else int(captured),
    )


def graph_bytes(runner: Any) -> int:
    """Return the bytes of the decode graphs and of their inputs, as the engine measured them; 0 if the engine did not
    measure them."""
    usage = getattr(runner, "graph_memory_usage", None)  # from 0.5.14 on
    if usage is None:
        return round(float(getattr(runner, "graph_mem_usage", 0) or 0) * GIB)
    return round(sum(float(usage.get(phase, 0)) for phase in ("decode", "target_verify")) * GIB)


def limits_of(scheduler: Any, fewer_requests: int = 0) -> Limits:
    """Return the limits of this scheduler's forward passes.

    :param fewer_requests: limit of concurrent requests, if an earlier rehearsal has lowered it; 0 for the scheduler's
        own limit.
    """
    in_force = {name: getattr(scheduler, name) for name in ("chunked_prefill_size", "max_prefill_tokens")}
    limits = derive_limits(
        arguments_of(scheduler.server_args) | in_force,
        server_facts(scheduler.tp_worker.model_runner),
        cache_tokens=scheduler.max_total_num_tokens,
        requests=scheduler.max_running_requests,
        input_tokens=scheduler.max_req_input_len - 1,  # the engine refuses a prompt of ``max_req_input_len`` tokens
    )
    if fewer_requests:
        limits = limits.with_requests(fewer_requests)
    tokenizer = getattr(scheduler, "tokenizer", None)
    # For a request with min_new_tokens, the engine reads the following two attributes. If one is missing, such a
    # request ends the server.
    stops = getattr(tokenizer, "eos_token_id", None) is not None and hasattr(tokenizer, "additional_stop_token_ids")
    return replace(limits, stop_token=stops, plants=can_plant(scheduler))


def warmup_limit_s() -> float:
    """Return the seconds after which the engine ends a server that has not answered its warm-up request; infinite if
    there is no limit. The engine's variable ``SGLANG_WARMUP_TIMEOUT`` sets the limit."""
    try:
        from sglang.srt.environ import envs

        limit_s = float(envs.SGLANG_WARMUP_TIMEOUT.get())
    except Exception:
        return math.inf
    return limit_s if limit_s > 0 else math.inf


# --- Requests and metrics ----------------------------------------------------------------------------------------


def make_request(name: str, prompt: Sequence[int], new: int, phase: Phase, *, tokenizer: Any) -> Any:
    """Make a request as the tokenizer process of the installed release makes it."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=new, ignore_eos=True, **phase.sampling)
    params.normalize(tokenizer)  # without a tokenizer 0.5.23 refuses min_new_tokens
    if params.stop_regex_strs is None:
        params.stop_regex_strs = []
    wants_array = "array" in str(TokenizedGenerateReqInput.__annotations__["input_ids"])
    made = TokenizedGenerateReqInput(
        input_text="",
        input_ids=array("q", prompt) if wants_array else list(prompt),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=phase.output_logprobs,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )
    made.rid = name
    return made


def make_abort() -> Any:
    """Make a request that aborts all other requests."""
    from sglang.srt.managers.io_struct import AbortReq

    return AbortReq(abort_all=True)


def make_flush() -> Any:
    """Make a request that flushes the prefix cache."""
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    return FlushCacheReqInput()


def drop_requests(scheduler: Any) -> None:
    """Drop all requests of a scheduler whose event loop has ended with an exception, and free their KV cache slots.

    :raises Exception: the scheduler does not flush its cache, or the CUDA context no longer works.
    """
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    scheduler.waiting_queue.clear()
    scheduler.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
    for name in ("last_batch", "cur_batch", "chunked_req"):
        if hasattr(scheduler, name):
            setattr(scheduler, name, None)
    if (results := getattr(scheduler, "result_queue", None)) is not None:
        results.clear()
    if not scheduler.flush_cache():
        raise RuntimeError(
            "SGLang did not drop the requests of a failed rehearsal, so this server cannot start; start it with "
            "SGLANG_MOE_PATCHES_KV_SIZING=off, and report the log"
        )


def mute_metrics(patcher: Patcher) -> None:
    """Stop all metrics of this process until the patcher undoes its patches."""
    # Do not import the module here. The engine must first set the variable with the folder of the metrics.
    prometheus_client = sys.modules.get("prometheus_client")
    if prometheus_client is None:
        return
    for name, methods in METRICS.items():
        kind = getattr(prometheus_client, name)
        for method in methods:
            patcher.wrap(kind, method, lambda original: lambda self, *args, **kwargs: None)
