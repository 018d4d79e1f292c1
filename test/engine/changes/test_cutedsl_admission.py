"""Tests that no forward pass of the engine's own scheduler has more tokens than cutedsl-sizing allocates buffers for.
This number of tokens is called the *bound*.

Each case is a server with random arguments and random requests. The scheduler is the engine's own: it admits requests,
mixes chunks and decodes, retracts requests, and runs decode batches. Only the forward pass is left out: every request
receives its next token at once.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import MISSING, dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import graph_arguments, pad_tokens
from sglang_moe_patches.changes import cutedsl_sizing
from sglang_moe_patches.changes.cutedsl_sizing.launcher import Pools, read_forward_limits
from sglang_moe_patches.changes.cutedsl_sizing.tokens import (
    ForwardLimits,
    compute_max_forward_tokens,
    compute_wrapper_tokens,
)
from sglang_moe_patches.core.patch import Status, probe
from share import case_count

pytestmark = pytest.mark.every_release

CASES = case_count(2_000)
VOCABULARY = 64


@dataclass(frozen=True)
class Case:
    """One server with random arguments and random requests.

    :param arguments: the server's arguments.
    :param cache_tokens: tokens of the KV cache.
    :param request_slots: number of requests that can run at once.
    :param context_length: tokens of the longest request, prompt and output.
    :param requests: for each request, its prompt tokens, its new tokens, and its sampling parameter ``ignore_eos``.
    """

    arguments: dict[str, Any]
    cache_tokens: int
    request_slots: int
    context_length: int
    requests: tuple[tuple[int, int, bool], ...]


def random_case(seed: int) -> Case:
    pick = random.Random(seed)
    page = pick.choice([1, 1, 4])
    context = pick.randrange(8, 160)
    chunk = pick.choice([-1, page * pick.randrange(1, 40)])
    slots = pick.randrange(1, 24)
    speculative = pick.random() < 0.3
    mixed = chunk > 0 and not speculative and pick.random() < 0.5
    steps, topk = pick.randrange(1, 6), pick.choice([1, 1, 2, 8])
    arguments: dict[str, Any] = {
        "page_size": page,
        "max_prefill_tokens": pick.randrange(1, 120),
        "chunked_prefill_size": chunk,
        "enable_mixed_chunk": mixed,
        "disable_radix_cache": pick.random() < 0.5,
        **graph_arguments(pick.choice([1, 4, 32]), pick.choice([None, None, 4, 64])),
        "pp_max_micro_batch_size": slots,
        "attention_backend": "torch_native",
        "device": "cpu",
    }
    if speculative:
        arguments |= {
            "speculative_algorithm": pick.choice(["EAGLE", "NGRAM", "STANDALONE"]),
            "speculative_num_steps": steps,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": steps + 1 if topk == 1 else pick.randrange(2, 9),
        }
    requests = []
    for _ in range(pick.randrange(1, 24)):
        prompt = pick.choice([1, pick.randrange(1, context), context - 2])
        requests.append((max(prompt, 1), pick.randrange(1, max(context - prompt, 2)) % 12 + 1, pick.random() < 0.5))
    return Case(arguments, page * pick.randrange(context // page + 4, 400), slots, context, tuple(requests))


def find_attribute_name(owner: Any, *names: str) -> str:
    """Return the first of ``names`` that ``owner`` has as an attribute. The name differs between engine releases."""
    return next(name for name in names if hasattr(owner, name))


class UnsetArguments:
    """Stand-in for server arguments, whose attributes are ``None`` if a case does not set them."""

    def __getattr__(self, name: str) -> None:
        return None


@pytest.fixture(scope="module")
def tokens_of_forwards():
    """Function that runs a case. It returns the case's server arguments and the number of tokens of each forward
    pass.
    """
    outcome = probe(cutedsl_sizing.CHANGE)
    if outcome.status is Status.NATIVE:
        pytest.skip(f"nothing to bound: {outcome.reason}")
    from sglang.srt import server_args as server_args_module
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.schedule_policy import SchedulePolicy
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache import allocator, memory_pool
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.chunk_cache import ChunkCache
    from sglang.srt.mem_cache.common import release_kv_cache
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    before = server_args_module._global_server_args

    class SchedulerWithoutModel(UnsetArguments, Scheduler):
        def __init__(self, **state: Any) -> None:
            self.__dict__.update(state)

        def _prefetch_kvcache(self, req: Any) -> None:
            pass

        def maybe_prepare_mlp_sync_batch(self, batch: Any, need_sync: Any = None) -> Any:
            return batch

        # Newer releases have these attributes in separate components.
        dp_attn_adapter = property(lambda self: self)
        load_inquirer = SimpleNamespace(_get_num_pending_tokens=lambda **deduct: 0)
        metrics_reporter = UnsetArguments()

    def drive(case: Case) -> tuple[Any, list[int]]:
        args = server_args_module.ServerArgs(model_path="dummy")
        vars(args).update(case.arguments)
        server_args_module.set_global_server_args_for_scheduler(args)
        pool = memory_pool.ReqToTokenPool(case.request_slots, case.context_length + 8, "cpu", False)
        # Pages are counted as tokens here, because the engine's page allocator needs a GPU.
        tokens = allocator.TokenToKVPoolAllocator(case.cache_tokens, torch.bfloat16, "cpu", SimpleNamespace(), False)
        params = CacheInitParams(
            disable=args.disable_radix_cache,
            req_to_token_pool=pool,
            token_to_kv_pool_allocator=tokens,
            page_size=1,
        )
        chunked = args.chunked_prefill_size > 0
        cache = ChunkCache(params) if chunked and args.disable_radix_cache else RadixCache(params)
        scheduler: Any = SchedulerWithoutModel(
            server_args=args,
            page_size=args.page_size,
            req_to_token_pool=pool,
            token_to_kv_pool_allocator=tokens,
            tree_cache=cache,
            model_config=SimpleNamespace(
                is_matryoshka=False, is_encoder_decoder=False, vocab_size=VOCABULARY, is_multimodal=False
            ),
            spec_algorithm=SpeculativeAlgorithm.NONE,
            grammar_manager=SimpleNamespace(has_waiting_grammars=lambda: False),
            policy=SchedulePolicy("fcfs", cache, False, False, False),
            running_batch=ScheduleBatch(reqs=[]),
            chunked_prefill_size=args.chunked_prefill_size if chunked else None,
            is_mixed_chunk=chunked and args.enable_mixed_chunk,
            max_prefill_tokens=args.max_prefill_tokens,
            max_running_requests=case.request_slots,
            **new_token_ratio(),
            priority_scheduling_preemption_threshold=0,
            max_prefill_bs=0,
            waiting_queue=[],
            forward_ct=0,
            pp_size=1,
            disaggregation_mode=DisaggregationMode.NULL,
        )
        pick = random.Random(len(case.requests))
        for number, (prompt, new, ignore_eos) in enumerate(case.requests):
            sampling = SamplingParams(max_new_tokens=new, ignore_eos=ignore_eos, temperature=0)
            sampling.normalize(None)
            ids = [pick.randrange(VOCABULARY) for _ in range(prompt)]
            req = Req(str(number), "", ids, sampling, vocab_size=VOCABULARY)
            if isinstance(req.output_ids, array):  # newer releases
                req = Req(str(number), "", array(req.output_ids.typecode, ids), sampling, vocab_size=VOCABULARY)
            scheduler.waiting_queue.append(req)
        found = []
        while (batch := scheduler.get_next_batch_to_run()) is not None:
            extends = batch.forward_mode.is_extend()
            found.append((True, batch.extend_num_tokens) if extends else (False, batch.batch_size()))
            for req in batch.reqs:
                middle_chunks = find_attribute_name(req, "inflight_middle_chunks", "is_chunked")
                if extends and getattr(req, middle_chunks) > 0:
                    setattr(req, middle_chunks, getattr(req, middle_chunks) - 1)
                    continue
                req.output_ids.append(pick.randrange(VOCABULARY))
                getattr(req, find_attribute_name(req, "update_finish_state", "check_finished"))()
                if req.finished():
                    release_kv_cache(req, cache)
                elif extends and req not in (batch.decoding_reqs or []):
                    cache.cache_unfinished_req(req)
            batch.output_ids = torch.zeros(len(batch.reqs), dtype=torch.int64)
            scheduler.last_batch = batch
            scheduler.forward_ct += 1
            assert len(found) < 2_000, "the scheduler does not get anywhere"
        per_request = max(tokens_per_request(args))
        return args, [count if extends else count * per_request for extends, count in found]

    def new_token_ratio() -> dict[str, Any]:
        ratio, least, decay = 0.1, 0.05, 0.01
        try:
            from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
        except ImportError:
            return {"new_token_ratio": ratio, "min_new_token_ratio": least, "new_token_ratio_decay": decay}
        tracker = NewTokenRatioTracker(init=ratio, min=least, decay=decay, current=ratio)
        return {"new_token_ratio_tracker": tracker}

    def tokens_per_request(args: Any) -> list[int]:
        """Return the tokens per request of each kind of decode forward pass that the server runs.

        - Without speculative decoding: one number, for the decode.
        - NGRAM: one number, for the verification.
        - EAGLE: three numbers, for the verification, the draft and the draft-extend.

        The number for the verification comes from the engine's ``EagleVerifyInput``.
        """
        if not args.speculative_algorithm:
            return [1]
        from sglang.srt.speculative import eagle_info

        unset = {field.name: None for field in fields(eagle_info.EagleVerifyInput) if field.default is MISSING}
        verify = eagle_info.EagleVerifyInput(**{**unset, "draft_token_num": args.speculative_num_draft_tokens})
        if args.speculative_algorithm == "NGRAM":
            return [verify.num_tokens_per_req]
        # EAGLEWorker and its graph runners set these numbers for draft steps, and for the draft-extend forward pass
        # that follows a verification.
        return [verify.num_tokens_per_req, args.speculative_eagle_topk, args.speculative_num_steps + 1]

    yield drive
    server_args_module.set_global_server_args_for_scheduler(before)


@dataclass(frozen=True)
class Outcome:
    """Result of one case.

    :param limits: the settings and sizes from which cutedsl-sizing computes its bound.
    :param largest: tokens of the largest forward pass.
    :param engine_bound: the bound that the engine itself computes, or ``None`` if the engine release computes none.
    """

    case: Case
    limits: ForwardLimits
    largest: int
    engine_bound: int | None


@pytest.fixture(scope="module")
def outcomes(tokens_of_forwards) -> list[Outcome]:
    made = []
    for seed in range(CASES):
        case = random_case(seed)
        args, found = tokens_of_forwards(case)
        pools = Pools(case.request_slots, case.cache_tokens, case.context_length)
        engine_bound = args.cutedsl_moe_max_num_tokens() if hasattr(args, "cutedsl_moe_max_num_tokens") else None
        made.append(Outcome(case, read_forward_limits(args, pools), max(found), engine_bound))
    return made


def test_no_forward_is_larger_than_the_bound(outcomes):
    for seed, outcome in enumerate(outcomes):
        assert outcome.largest <= compute_max_forward_tokens(outcome.limits), f"seed {seed}: {outcome}"
    reached = sum(o.largest == compute_max_forward_tokens(o.limits) for o in outcomes)
    assert reached > CASES // 50, "a bound that no forward reaches would be no tight one"


def test_upstreams_formula_is_exceeded(outcomes):
    beyond = sum(outcome.largest > upstreams_bound(outcome.limits) for outcome in outcomes)
    print(f"{CASES} cases: {beyond} have a forward larger than upstream's number")
    assert beyond > CASES // 20


def test_the_engines_own_number_is_upstreams_and_below_the_bound(outcomes):
    if outcomes[0].engine_bound is None:
        pytest.skip("this release has no number of its own")
    assert all(o.engine_bound == upstreams_bound(o.limits) <= compute_max_forward_tokens(o.limits) for o in outcomes)


@pytest.mark.parametrize(
    "limits_changed",
    [
        *({"chunk_tokens": 0}, {"request_tokens": 0}, {"unchecked_requests": False}, {"requests": 0}),
        {"other_tokens_per_request": 1},  # draft and draft-extend forwards
    ],
    ids=lambda limits_changed: next(iter(limits_changed)),
)
def test_without_any_one_limit_a_forward_exceeds_the_bound(outcomes, limits_changed):
    assert any(o.largest > compute_max_forward_tokens(replace(o.limits, **limits_changed)) for o in outcomes)


@pytest.mark.usefixtures("tokens_of_forwards")
@pytest.mark.parametrize("extend", [False, True])
def test_gathered_and_padded_forwards_fit(monkeypatch, extend):
    """The buffers have room for the tokens of all ranks, padding included. With data-parallel attention, the engine
    pads each rank's tokens, and gathers the tokens of all ranks.

    The engine pads in two ways. In a prefill, it pads each rank's tokens to a multiple of ``attn_tp``. In a decode, it
    may also pad all ranks to the largest number of tokens of a rank: ranks with 3 and 5 tokens then both have 5. The
    test covers both ways.
    """
    pick = random.Random(extend)
    to_the_longest, padded_beyond = set(), 0
    for _ in range(1_000):
        ranks, attn_tp, bound = pick.choice([2, 4, 8]), pick.choice([1, 2, 4]), pick.randrange(1, 50)
        counts = [pick.choice([0, bound, pick.randrange(bound + 1)]) for _ in range(ranks)]
        padded = pad_tokens(monkeypatch, counts, attn_tp, extend)
        to_the_longest.add(len(set(padded)) == 1 < len(set(counts)))
        rank_tokens = compute_max_forward_tokens(ForwardLimits(max_prefill_tokens=bound, padding=attn_tp))
        assert sum(padded) <= compute_wrapper_tokens(rank_tokens, ranks, None, 1)
        padded_beyond += sum(padded) > bound * ranks
    assert to_the_longest >= ({False} if extend else {True, False})
    assert padded_beyond


def upstreams_bound(limits: ForwardLimits) -> int:
    """Return the bound of the pull request sgl-project/sglang#26696 on the tokens in a forward pass."""
    return max(limits.max_prefill_tokens, limits.piecewise_tokens, limits.graph_requests * limits.draft_tokens)
