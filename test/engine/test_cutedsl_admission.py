"""cutedsl-sizing's bound against the engine's own scheduler: its admission, mixing, retraction and decode batches.

Each case is a server with random arguments and a random mix of requests. The scheduler is the engine's own; only the
forward is left out: every request gets its next token at once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_moe_patches.changes import cutedsl_sizing
from sglang_moe_patches.changes.cutedsl_sizing import Pools, max_forward_tokens

CASES = 2_000
VOCABULARY = 64


@dataclass(frozen=True)
class Case:
    """One server and its traffic: (prompt tokens, new tokens, ignore_eos) of each request."""

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
        "cuda_graph_max_bs": pick.choice([1, 4, 32]),
        "disable_piecewise_cuda_graph": pick.random() < 0.5,
        "piecewise_cuda_graph_max_tokens": pick.choice([4, 64]),
        "pp_max_micro_batch_size": slots,
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
    return Case(arguments, page * pick.randrange(context // page + 2, 400), slots, context, tuple(requests))


@pytest.fixture(scope="module")
def tokens_of_forwards():
    """A function of a case: its server arguments, and the tokens of every forward that the scheduler asks for."""
    from sglang.srt import server_args as server_args_module
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

    before = server_args_module.get_global_server_args()

    class SchedulerWithoutModel(Scheduler):
        def __init__(self, **state: Any) -> None:
            vars(self).update(state)

        def __getattr__(self, name: str) -> None:
            return None  # every option that a case does not set is off

        def maybe_prepare_mlp_sync_batch(self, batch: Any, need_sync: Any = None) -> Any:
            return batch

    def drive(case: Case) -> tuple[Any, list[int]]:
        args = server_args_module.ServerArgs(model_path="dummy")
        vars(args).update(case.arguments)
        server_args_module.set_global_server_args_for_scheduler(args)
        pool = memory_pool.ReqToTokenPool(case.request_slots, case.context_length + 8, "cpu", False)
        kind = allocator.TokenToKVPoolAllocator
        extra: tuple[Any, ...] = ()
        if args.page_size > 1:
            from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator as kind

            extra = (args.page_size,)
        tokens = kind(case.cache_tokens, *extra, torch.bfloat16, "cpu", SimpleNamespace(), False)
        params = CacheInitParams(
            disable=args.disable_radix_cache,
            req_to_token_pool=pool,
            token_to_kv_pool_allocator=tokens,
            page_size=args.page_size,
        )
        chunked = args.chunked_prefill_size > 0
        cache = ChunkCache(params) if chunked and args.disable_radix_cache else RadixCache(params)
        scheduler = SchedulerWithoutModel(
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
            new_token_ratio=0.1,
            min_new_token_ratio=0.05,
            new_token_ratio_decay=0.01,
            priority_scheduling_preemption_threshold=0,
            max_prefill_bs=0,
            waiting_queue=[],
            forward_ct=0,
            pp_size=1,
        )
        pick = random.Random(len(case.requests))
        for number, (prompt, new, ignore_eos) in enumerate(case.requests):
            sampling = SamplingParams(max_new_tokens=new, ignore_eos=ignore_eos, temperature=0)
            sampling.normalize(None)
            ids = [pick.randrange(VOCABULARY) for _ in range(prompt)]
            scheduler.waiting_queue.append(Req(str(number), "", ids, sampling, vocab_size=VOCABULARY))
        found = []
        while (batch := scheduler.get_next_batch_to_run()) is not None:
            extends = batch.forward_mode.is_extend()
            found.append((True, batch.extend_num_tokens) if extends else (False, batch.batch_size()))
            for req in batch.reqs:
                if req.is_chunked > 0 and extends:
                    req.is_chunked -= 1
                    continue
                req.output_ids.append(pick.randrange(VOCABULARY))
                req.check_finished()
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

    def tokens_per_request(args: Any) -> list[int]:
        """Of a decode, or of the draft, verification and draft-extend forwards, by the engine's own inputs to them."""
        if not args.speculative_algorithm:
            return [1]
        from sglang.srt.speculative import eagle_info

        verify = eagle_info.EagleVerifyInput.create_idle_input(
            args.speculative_eagle_topk, args.speculative_num_steps, args.speculative_num_draft_tokens
        )
        if args.speculative_algorithm == "NGRAM":
            return [verify.num_tokens_per_req]
        # As EAGLEWorker and its graph runners set them: draft steps, and draft-extend after a verification.
        return [verify.num_tokens_per_req, args.speculative_eagle_topk, args.speculative_num_steps + 1]

    yield drive
    server_args_module.set_global_server_args_for_scheduler(before)


def test_no_forward_is_larger_than_the_bound_and_many_are_larger_than_upstreams(tokens_of_forwards):
    beyond_upstream, at_the_bound = 0, 0
    for seed in range(CASES):
        case = random_case(seed)
        args, found = tokens_of_forwards(case)
        pools = Pools(case.request_slots, case.cache_tokens, case.context_length)
        bound = max_forward_tokens(cutedsl_sizing._limits_of(args, pools))
        assert max(found) <= bound, f"seed {seed}: {max(found)} tokens, bound {bound}: {case}"
        upstream = upstreams_bound(args)
        beyond_upstream += max(found) > upstream
        at_the_bound += max(found) == bound
        assert bound >= upstream
    print(f"{CASES} cases: {beyond_upstream} beyond upstream's number, {at_the_bound} reach the bound")
    assert beyond_upstream > CASES // 20
    assert at_the_bound > CASES // 20


def upstreams_bound(args: Any) -> int:
    """sgl-project/sglang#26696, in the words of SPEC.md: the largest of its three terms."""
    piecewise = 0 if args.disable_piecewise_cuda_graph else args.piecewise_cuda_graph_max_tokens
    per_request = args.speculative_num_draft_tokens if args.speculative_algorithm else 1
    return max(args.max_prefill_tokens, piecewise, args.cuda_graph_max_bs * per_request)
