"""Take guards of docs/development/guards.md out, one after the other, and see whether their tests fail.

    make guards                    # all of MUTATIONS
    make guards ARGS="cutedsl"     # those whose file or test has this in its name

In a copy of the repository, where the tests must pass first. A line for each mutation: *killed*, *SURVIVED*, or
*skipped*, where this release skips the test, or has no use for what the mutation changes (``until``). The lines are in
the table's order, and standard output has nothing else. So two commits are compared by::

    make -s guards > before        # in the one, then after in the other
    diff before after

To add one, append a row to ``MUTATIONS``: the file, text that is there once, what takes its place, and one test that
fails then, with its parameters in brackets if a single case is enough. Run ``make guards`` with the file's name, and
name what was broken in the test's line of guards.md. What tests miss needs another case, in the table nearest to it.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from releases import ALL, ROOT

RELEASE = ALL.index(metadata.version("sglang"))
PACKAGES = ("torch", "transformers.modeling_utils", "transformers.processing_utils", "fastapi", "hypothesis")
"""Those that tests take longest to import: each mutation is tried in a fork of one process that has them."""
OURS = "python/sglang_moe_patches/"
ENGINE, UNIT = "test/engine/", "test/unit/"


class Mutation(NamedTuple):
    """``old``, which is once in ``file``, becomes ``new``, and ``test`` (as pytest names it) must fail.

    :param until: the last release of ``releases.toml`` on which the test runs this code; "": the newest.
    """

    file: str
    old: str
    new: str
    test: str
    until: str = ""


SWIZZLED_UNTIL = OFFERS_ALL_UNTIL = "0.5.12.post1"
"""Later releases allocate no swizzled scales beside those that were loaded, and offer buffers themselves."""
SIZED_UNTIL = "0.5.15.post1"
"""Later releases size CuteDSL's buffers themselves."""
FLAGS_UNTIL = "0.5.13"
"""Later releases have graphs' settings in one argument."""
OFFER = OURS + "core/dead_input/offer.py"
CUTEDSL = OURS + "changes/cutedsl_sizing/wrapper.py"
OUTPUT_BUFFER = ENGINE + "changes/test_output_buffer.py::test_"
SERVERS = ENGINE + "lab/test_servers.py::test_"
CUTEDSL_SERVER = (
    f"{ENGINE}lab/test_server_kinds.py::test_cutedsl_serves_a_prompt_beyond_the_budget_from_buffers_of_one_layer"
)
LIMIT = "test/tools/processor_time.py"
LIMITED = UNIT + "test_processor_time.py::test_what_takes_too_long_in_its_process_or_below_fails_without_a_reason"
FORKS = "test/standins/preloaded/sitecustomize.py"
FORKED = UNIT + "test_preloaded.py::test_what_a_server_spawns_is_forked_has_its_environment_and_ends_it_when_it_fails"
FP4, UNREAD = OURS + "changes/fp4_weights/__init__.py", OURS + "changes/fp4_weights/unread.py"
SCALES = ENGINE + "changes/test_fp4_unread_scales.py::test_"
ZEROS = SCALES + "behind_hoppers_scales_lie_zeros"
REPACK, REPACKED = OURS + "changes/fp4_weights/repack.py", ENGINE + "changes/test_fp4_repack.py::test_"
IN_PLACE = REPACKED + "experts_are_repacked_where_they_were_with_the_same_bits"
HELD = REPACKED + "weights_that_somebody_holds_are_not_written_over"
OTHER_ORDER = REPACKED + "in_another_order_they_are_stacked_by_the_engine_with_the_same_bits"
READ_AGAIN = REPACKED + "where_a_newer_release_reads_loaded_weights_again_they_are_left_alone"
WEIGHTS = ENGINE + "changes/test_fp4_weights.py::test_"
NEWER = SCALES + "where_a_newer_release_may_read_them_they_stay"
QUERY, POOLS, REPORT = (OURS + f"lab/predict/{name}.py" for name in ("engine_query", "engine_pools", "model_report"))
DECISION = OURS + "changes/moe_workspace/decision.py"
BUFFER = OURS + "changes/output_buffer.py"
SAID = ENGINE + "lab/test_doctor_cases.py::test_doctor_says_of_a_server_what_the_engine_would_do[{}]"
OF_HERE = UNIT + "test_cli.py::test_doctor_says_what_a_server_of_this_environment_says"
REPORTED = UNIT + "lab/predict/test_model_report.py::test_"
PLANTED = ENGINE + "memory/test_planted_prefix.py::test_"
KV_ENGINE = ENGINE + "memory/test_kv_sizing.py::test_"
KV, KV_UNIT = OURS + "memory/kv_sizing/", UNIT + "memory/kv_sizing/test_"
ALIKE = KV_UNIT + "growth.py::test_all_ranks_grow_alike_or_none_does"
AGAIN = KV_UNIT + "growth.py::test_what_is_larger_afterwards_is_rehearsed_once_more_and_the_cache_shrinks_to_it"
BESIDE_LONG = KV_UNIT + "phases.py::test_a_long_request_and_the_short_ones_beside_it_have_room_at_once"
LEAST = KV_UNIT + "sizing.py::test_all_ranks_have_what_fits_on_the_one_with_the_least"
TAIL = KV_UNIT + "retirement.py::test_in_every_turn_free_and_held_slots_add_up_to_what_the_engine_believes"
PLANT, DRIVER, SERVING, REHEARSAL, ADDRESSES = (
    f"{KV}{name}.py" for name in ("planted_prefix", "driver", "serving", "rehearsal", "address_space")
)
NO_PREFIX = PLANTED + "where_a_cache_wants_more_than_a_prefix_nothing_is_planted"
NO_SLOT_LOST = PLANTED + "no_slot_is_lost_or_held_twice_whatever_the_cache_has_already"
OWN_ROOM = KV_UNIT + "serving.py::test_each_rank_keeps_room_for_its_own_longest_request_until_it_has_ended"
UNWATCHED = KV_UNIT + "serving.py::test_a_driver_that_does_not_answer_ends_the_watch_and_not_the_server"
LACKS = KV_UNIT + "serving.py::test_the_first_rank_orders_what_another_one_lacks"
COME_BACK = KV_UNIT + "serving.py::test_slots_that_are_held_come_back_later_and_a_flush_brings_all"
STUCK = f"{KV_UNIT}rehearsal.py::test_who_waits_is_stuck_when_nothing_has_run_for_long"
ABORTED = f"{KV_UNIT}driver.py::test_requests_that_a_server_will_not_admit_are_aborted_and_the_next_phase_begins"
JUDGED = f"{KV_UNIT}rehearsal.py::test_a_decode_runs_where_memory_is_left_and_unasked_if_others_need_as_much"
MUTATIONS = tuple(
    Mutation(*parts)
    for parts in (
        (
            OFFER,
            "and not shares_storage(hidden_states, residual)",
            "",
            UNIT + "changes/test_output_buffer.py::test_a_layer_input_that_is_the_residual_is_not_offered",
        ),
        (
            OFFER,
            "and not has_hooks(self)",
            "",
            ENGINE + "core/test_dead_input.py::test_a_layer_with_a_forward_hook_offers_nothing",
        ),
        (
            OFFER,
            "lambda buf: nullcontext()",
            "lambda buf: original(buf)",
            OUTPUT_BUFFER + "the_engines_own_buffer_overwrites_a_residual_and_ours_keeps_it",
        ),
        (
            OFFER,
            "lambda buf: nullcontext()",
            "lambda buf: original(buf)",
            SERVERS + "where_the_engines_buffer_answers_wrongly_the_patched_server_answers_as_without_it",
        ),
        (
            OFFER,
            "channel.exchange(tensor.detach())",
            "channel.exchange(None)",
            SERVERS + "stock_and_patched_answer_alike_and_patched_uses_one_buffer",
        ),
        (
            OURS + "core/dead_input/takers.py",
            "if buffer is None or shares_storage(buffer, dispatch_output.hidden_states):",
            "if buffer is None:",
            OUTPUT_BUFFER + "the_moe_input_itself_is_never_written_into",
        ),
        (
            OURS + "core/dead_input/channel.py",
            "buffer.shape == shape",
            "True",
            OUTPUT_BUFFER + "a_wrong_shape_is_not_taken",
        ),
        (
            OURS + "lab/regress/compare.py",
            "if self.worse:\n            return WORSE",
            "if False:\n            pass",
            SERVERS + "regress_calls_a_server_worse_that_answers_otherwise",
        ),
        (CUTEDSL, "    if shares:", "    if False:", CUTEDSL_SERVER),
        (CUTEDSL, "shares and key in _shared", "False", CUTEDSL_SERVER),
        (CUTEDSL, "max_forward_tokens(forward_limits(server_args, _largest_pools))", "128", CUTEDSL_SERVER),
        (
            UNREAD,
            "and name not in read",
            "",
            SCALES + "what_no_forward_reads_takes_no_memory_and_the_answer_is_the_same",
        ),
        (
            FP4,
            "result = original(self, layer, *args, **kwargs)\n    with best_effort(\"a layer's",
            'give_up_unread_scales(layer)\n    result = original(self, layer)\n    with best_effort("x',
            SCALES + "what_no_forward_reads_takes_no_memory_and_the_answer_is_the_same",
        ),
        (FP4, "\n        put_zeros_behind_scales(self)", "\n        pass", ZEROS),
        (FP4, "data.new_zeros(", "data.new_empty(", ZEROS),
        (FP4, "_SCALE_BYTES_AT_ONCE = 128", "_SCALE_BYTES_AT_ONCE = 64", ZEROS),
        (FP4, " if storage.expired()", "", SCALES + "a_scale_whose_memory_is_read_is_not_counted"),
        (FP4, "    if loader is not None:", "    if False:", SCALES + "an_update_ends_as_on_the_stock_server"),
        (
            FP4,
            "_placeholder(scale) if _no_swizzled_scales.get() else original(scale)",
            "original(scale)",
            WEIGHTS + "placeholders_are_not_allocated",
            SWIZZLED_UNTIL,
        ),
        (
            FP4,
            "        if self._moe_runner_backend.value in _MARLIN:\n            drop_swizzled_scales(layer)",
            "        pass",
            WEIGHTS + "marlin_keeps_no_scales_that_it_never_reads_and_no_list_of_experts",
        ),
        (
            FP4,
            "if self._moe_runner_backend.value in _MARLIN:",
            "if True:",
            WEIGHTS + "what_another_kernel_reads_stays",
        ),
        (UNREAD, "and name not in read", "", NEWER),
        (UNREAD, "name in _unsettled(kind)", "False", NEWER),
        (UNREAD, "and not _said_elsewhere(type(method), type(layer), name)", "", NEWER),
        (UNREAD, "any(value is layer for owner in", "any(False for owner in", NEWER),
        (UNREAD, 'not hasattr(function, "__wrapped__")', "True", NEWER),
        (UNREAD, "not isinstance(called, FunctionType | property)", "True", NEWER),
        (UNREAD, "isinstance(vars(layer).get(attribute), dict)", "False", NEWER),
        (UNREAD, "return _UNKNOWN if _UNKNOWN in truths else not decisive", "return not decisive", NEWER),
        (UNREAD, "engine.require(not kept,", "engine.require(True,", NEWER),
        (UNREAD, "self.attributes |= _Reader(function, known, subjects[0], self.callers).read()", "", NEWER),
        (UNREAD, "engine.require(isinstance(name, ast.Constant), ", "engine.require(True, ", NEWER),
        (UNREAD, "                self.known[node.id] = _UNKNOWN", "                pass", NEWER),
        (REPACK, "if function is torch.stack:", "if False:", IN_PLACE),
        (
            REPACK,
            "self._written.append(memory.view(result.shape).copy_(result))",
            "self._written.append(result)",
            IN_PLACE,
        ),
        (REPACK, " if _references(layer._parameters, name) != alone", " if False", HELD),
        (REPACK, "sys.getrefcount(parameters[name])", "0", HELD),
        (REPACK, "torch._C._storage_Use_Count(memory._cdata)", "0", HELD),
        (REPACK, ", *self._kept)", ",)", HELD),
        (REPACK, " and _lie_in_order(written)", "", OTHER_ORDER),
        (REPACK, "_are_the_same(args[0], written)", "written", OTHER_ORDER),
        (REPACK, "engine.require(given == [*_LOCALS],", "engine.require(True,", READ_AGAIN),
        (REPACK, "node in inside or ", "", READ_AGAIN),
        (REPACK, "or node.lineno >= calls[0].lineno", "", READ_AGAIN),
        (REPACK, "*_LOCALS, *WEIGHTS", "*_LOCALS,", READ_AGAIN),
        (REPACK, 'and "layer" in map(_said, arguments)', "and False", READ_AGAIN),
        (
            REPACK,
            "engine.require(sorted(read) ==",
            "engine.require(True or sorted(read) ==",
            REPACKED + "where_a_newer_release_reads_an_expert_twice_it_is_left_alone",
        ),
        (
            FP4,
            "    engine.require_unpatched(utils, _REPACK)\n",
            "",
            REPACKED + "where_a_hook_point_is_somebody_elses_it_does_nothing",
        ),
        (
            FP4,
            'if engine.mentions(helper or prepare, _REPACK, "stack"):',
            "if True:",
            REPACKED + "a_release_that_stacks_no_list_is_left_alone",
        ),
        (LIMIT, "taken_s > (limit_s := LIMIT_S * how_slow())", "False", LIMITED),
        (LIMIT, "this.children(recursive=True)", "this.children()", LIMITED),
        (LIMIT, 'fixturedef.scope == "session"', "False", LIMITED),
        (LIMIT, 'item.get_closest_marker("long") is not None or ', "", LIMITED),
        (FORKS, "_Popen = context.ForkServerProcess._Popen", "_Popen = context.SpawnProcess._Popen", FORKED),
        (FORKS, 'os.environ.update(data.pop("environ"))', 'data.pop("environ")', FORKED),
        (FORKS, "os.kill(os.getppid(), signal.SIGQUIT)", "None", FORKED),
        (FORKS, "ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)", "", FORKED),
        (OURS + "lab/doctor.py", "if engine.is_left_out():", "if False:", OF_HERE),
        (OURS + "lab/doctor.py", "_arguments_without_flags() if change.name in names else None", "None", OF_HERE),
        (QUERY, "attention_ranks(resolved)\n", "1\n", SAID.format("gathered from four ranks, 4,096 tokens each")),
        (QUERY, "parsed.mem_fraction_static is not None", "False", SAID.format("a given fraction below the weights")),
        (QUERY, "engine_pools.stage_layers(view, ", "int(", SAID.format("the first of two stages")),
        (QUERY, "resolved.pp_size * (dense_layers", "(dense_layers", SAID.format("the first of two stages")),
        (QUERY, "vars(made).update(given)", "pass", SAID.format("linear attention in FP8")),
        (QUERY, ", 48, integrated=True", ", 48", SAID.format("a GPU that shares its memory")),
        (
            QUERY,
            'resolved["disable_cuda_graph"] or resolved["disable_piecewise_cuda_graph"]',
            "False",
            SAID.format("no graphs of prefills"),
            FLAGS_UNTIL,
        ),
        (
            QUERY,
            'settings["off"]',
            "False",
            SAID.format("graphs of prefills that are off by themselves"),
        ),
        (
            REPORT,
            "and server.tokens <= graphs[1]",
            "",
            SAID.format("a chunk that is larger than the graphs of prefills"),
        ),
        (
            POOLS,
            'vars(psutil)["virtual_memory"] = lambda: SimpleNamespace(available=free)',
            "pass",
            SAID.format("a GPU that shares its memory"),
        ),
        (QUERY, 'name.endswith("_blockscale_swizzled")', "False", SAID.format("NVFP4 on TRT-LLM"), SWIZZLED_UNTIL),
        (QUERY, "skip_reason or why_not_pools", "skip_reason", SAID.format("a KV cache of another kind")),
        (
            QUERY,
            "fit.unknown if fit else unknown",
            '""',
            SAID.format("a KV cache that the engine cannot be asked for"),
        ),
        (OURS + "changes/output_buffer.py", '"" if taking else reason', "reason", SAID.format("NVFP4 on TRT-LLM")),
        (
            OURS + "memory/kv_sizing/pools.py",
            "= rule, top, page, rule",
            "= rule, top, page, top",
            KV_UNIT + "pools.py::test_the_tokens_of_the_rule_have_memory_and_no_more",
        ),
        (
            QUERY,
            '"in_place": runners.is_in_place(experts)',
            '"in_place": True',
            SAID.format("out of place by the engine"),
        ),
        (POOLS, "_resolve_pools(maker, fit, fit.memory - fit.weights)", "None", SAID.format("sliding windows")),
        (
            POOLS,
            " or unknown_pool_reason(*_pool_classes(maker, config))",
            "",
            SAID.format("a KV cache of another kind"),
        ),
        (
            POOLS,
            "if sizes and not skip_reason and not fit.given:",
            "if False:",
            SAID.format("a rule that leaves nothing, and a cache that is grown"),
        ),
        (REPORT, 'source = "the given --mem-fraction-static" if given else', "source =", SAID.format("prefill alone")),
        (
            REPORT,
            "(change.decide and decision is None)",
            "False",
            REPORTED + "a_layer_that_could_not_be_built_is_not_known",
        ),
        (
            REPORT,
            'or (SHARED_LAST in effects and server.runner == "triton" and bool(server.family))',
            "",
            REPORTED + "what_acts_is_what_the_changes_decided",
        ),
        (
            DECISION,
            "not triton.can_run_in_columns(tokens, top_k, hooks=None, defer_sum=False)",
            "False",
            SAID.format("a top-k of 2"),
        ),
        (
            DECISION,
            " and rows * inner <= tokens * hidden",
            "",
            SAID.format("an activation that is too large for the dead input"),
        ),
        (DECISION, "if offered and is_cut", "if offered", SAID.format("Marlin, where a slice costs too much")),
        (
            DECISION,
            "_empty(tokens, hidden) if offered else None",
            "None",
            SAID.format("Marlin, cut because it is asked for"),
        ),
        (
            BUFFER,
            "[OUTPUT_IN_DEAD_INPUT] if taking",
            "[OUTPUT_IN_DEAD_INPUT] if offering",
            SAID.format("gathered from four ranks, 4,096 tokens each"),
        ),
        (BUFFER, " and _has_attention_inputs(built.model)", "", SAID.format("BF16 on TRT-LLM"), OFFERS_ALL_UNTIL),
        (
            OURS + "changes/deferred_shared_experts.py",
            "if None in orders:",
            "if False:",
            SAID.format("FP8 on TRT-LLM, which the engine defers behind"),
        ),
        (
            OURS + "changes/cutedsl_sizing/__init__.py",
            "((OUTPUT_IN_DEAD_INPUT,) if takes else ())",
            "()",
            SAID.format("NVFP4 on CuteDSL"),
            SIZED_UNTIL,
        ),
        (KV + "hooks.py", "self._counts_before if mapped else self.pools.counts", "self.pools.counts", ALIKE),
        (KV + "hooks.py", "self.pools.unmap_from(counts)\n        self._requests", "self._requests", ALIKE),
        (KV + "hooks.py", "problem = str(error) or type(error).__name__", "pass", ALIKE),
        (KV + "hooks.py", "again = self._pass < sizing.MAX_PASSES", "again = False", AGAIN),
        (KV + "sizing.py", "min(need.fits for need in needs)", "max(need.fits for need in needs)", LEAST),
        (KV + "sizing.py", "if fits > now and needs[0].missed:", "if False:", LEAST),
        (SERVING, "(pages[~in_tail] if len(gone) else pages)", "pages", TAIL),
        (KV + "rehearsal.py", "(must or times * taken <= largest)", "True", JUDGED),
        (KV + "rehearsal.py", "taken += graph_bytes(self.runner)", "pass", JUDGED),
        (KV + "rehearsal.py", "if left >= MIN_FREE_BYTES and", "if left >= 0 and", JUDGED),
        (KV + "rehearsal.py", "bool(scheduler.waiting_queue) and not runs", "not runs", STUCK),
        (KV + "rehearsal.py", "            self._last_forward = time.monotonic()\n", "", STUCK),
        (KV + "rehearsal.py", "scheduler.chunked_req is not None or ", "", STUCK),
        (KV + "driver.py", "yield [self._abort()] if self._stuck else", "yield", ABORTED),
        (KV + "driver.py", "if self._ended or self._stuck:", "if self._ended:", ABORTED),
        (
            KV + "phases.py",
            "min(short.new_tokens, max_new_tokens(limits.requests, half, wanted))",
            "min(short.new_tokens, wanted)",
            BESIDE_LONG,
        ),
        (KV + "phases.py", "limits.cache_tokens // 2, left)", "limits.cache_tokens // 2)", BESIDE_LONG),
        (
            KV + "facts.py",
            'getattr(runner, "token_to_kv_pool_allocator", None)',
            "pool",
            KV_UNIT + "facts.py::test_pools_are_told_by_their_kind",
        ),
        (
            ADDRESSES,
            " if number not in self._mapped]",
            "]",
            KV_UNIT + "address_space.py::test_addresses_stay_and_so_do_values_while_the_tail_comes_and_goes",
        ),
        (
            ADDRESSES,
            "self._memory.unmap(*self._extent(run))\n            raise",
            "pass\n            raise",
            KV_UNIT + "address_space.py::test_where_there_is_not_enough_nothing_changes",
        ),
        (
            ADDRESSES,
            "before = max(before, found.stop)",
            "pass",
            KV_UNIT + "address_space.py::test_exactly_the_granules_of_the_first_rows_of_every_plane_are_mapped",
        ),
        (
            ADDRESSES,
            "sorted(self._mapped - needed)",
            "[]",
            KV_UNIT + "address_space.py::test_new_memory_is_zero_whatever_was_there_before",
        ),
        (SERVING, "self.held[gone.cpu() - self.kept - 1] = False", "pass", TAIL),
        (SERVING, "        if changed:", "        if False:", TAIL),
        (SERVING, "each.held[:] = False", "pass", TAIL),
        (SERVING, "any(taken) or self._flushed", "any(taken)", COME_BACK),
        (
            SERVING,
            "int(held[-1]) + 1 if len(held) else 0",
            "len(held)",
            KV_UNIT + "retirement.py::test_when_nobody_holds_a_slot_of_the_tail_the_allocator_is_as_one_of_that_size",
        ),
        (
            SERVING,
            "[each.take_out() for each in self._tails.values()]",
            "(each.take_out() for each in self._tails.values())",
            KV_UNIT + "retirement.py::test_both_kinds_of_a_sliding_window_cache_come_back",
        ),
        (
            SERVING,
            "if free < LOW_MARGIN_FRACTION * self.margin else",
            "if free < self.margin else",
            KV_UNIT + "serving.py::test_short_is_less_than_half_the_margin_and_what_lacks_is_all_of_it",
        ),
        (
            SERVING,
            "if not self._ordered and (",
            "if (",
            KV_UNIT + "serving.py::test_the_tail_goes_until_the_margin_is_free_again",
        ),
        (
            KV + "hooks.py",
            "max(self._need, without_forwards - seen.lowest)",
            "without_forwards - seen.lowest",
            KV_UNIT + "growth.py::test_a_later_rehearsal_forgets_no_need_of_an_earlier_one",
        ),
        (
            KV + "hooks.py",
            "without_forwards - seen.lowest)",
            "without_forwards - min(seen.lowest, seen.expected))",
            KV_UNIT + "growth.py::test_what_would_have_been_taken_counts_once_and_is_forgotten_when_it_has_run",
        ),
        (
            KV + "hooks.py",
            "            self._rehearsal.end()\n        counts = ",
            "            pass\n        counts = ",
            KV_UNIT + "growth.py::test_a_rank_whose_rehearsal_nobody_ended_swallows_no_answer",
        ),
        (
            KV + "sizing.py",
            "min(now, least)",
            "min(now, 1)",
            KV_UNIT + "sizing.py::test_all_ranks_have_what_fits_on_the_one_with_the_least",
        ),
        (SERVING, "self._orders.give(Flush())", "pass", COME_BACK),
        (
            SERVING,
            "held or self._board.is_raised(held_flag)",
            "held",
            KV_UNIT + "serving.py::test_what_prefixes_hold_on_another_rank_comes_back_when_nothing_runs",
        ),
        (
            SERVING,
            'f"{HELD} {self._told} {self._flushed}"',
            'f"{HELD} {self._told}"',
            KV_UNIT + "serving.py::test_what_prefixes_hold_on_another_rank_comes_back_when_nothing_runs",
        ),
        (
            SERVING,
            "frees or answer:",
            "frees:",
            KV_UNIT + "serving.py::test_what_another_rank_lacked_once_is_not_given_back_for_ever",
        ),
        (
            SERVING,
            "least = max(longest_request(self._scheduler), least_tokens(self._scheduler))",
            "least = longest_request(self._scheduler)",
            KV_UNIT + "serving.py::test_two_prefills_and_the_first_ranks_longest_request_keep_their_room",
        ),
        (
            SERVING,
            "least = max(longest_request(self._scheduler), least_tokens(self._scheduler))",
            "least = least_tokens(self._scheduler)",
            KV_UNIT + "serving.py::test_two_prefills_and_the_first_ranks_longest_request_keep_their_room",
        ),
        (SERVING, "max(self._goal, longest_request(self._scheduler))", "self._goal", OWN_ROOM),
        (SERVING, '"grammar_queue", ()', '"no_queue", ()', OWN_ROOM),
        (SERVING, "if self._goal < self._pools.counts.tokens:  #", "if False:  #", OWN_ROOM),
        (
            SERVING,
            "if self._retirement is None and self._goal",
            "if self._goal",
            KV_UNIT + "serving.py::test_what_is_ordered_meanwhile_comes_after_what_is_under_way",
        ),
        (
            KV + "token_count.py",
            "bound = goal or counts",
            "bound = counts",
            KV_UNIT + "retirement.py::test_what_would_not_fit_at_the_goal_is_not_taken_in_before_it",
        ),
        (
            SERVING,
            "if frees or answer:",
            "if True:",
            KV_UNIT + "serving.py::test_where_nothing_can_go_nothing_is_ordered",
        ),
        (SERVING, "max(shortage, int(self._memory.margin * LOW_MARGIN_FRACTION))", "shortage", LACKS),
        (SERVING, "self._ordered, self._told = False, self._told + 1", "self._ordered = False", LACKS),
        (SERVING, "self._failed.add(what)", "pass", UNWATCHED),
        (SERVING, "if what in self._failed:", "if self._failed:", UNWATCHED),
        (
            KV + "eligibility.py",
            ", switchable=not asked",
            "",
            KV_UNIT + "launcher.py::test_nothing_is_hooked_where_it_is_not_asked_for",
        ),
        (PLANT, "type(tree).__name__ in CACHES\n        and ", "", NO_PREFIX),
        (PLANT, "        and not tree.disable\n", "", NO_PREFIX),
        (PLANT, '        and parts == ["FULL"]\n', "", NO_PREFIX),
        (PLANT, "        and int(tree.page_size) == int(allocator.page_size)\n", "", NO_PREFIX),
        (PLANT, 'getattr(tree, "cache_controller", None) is None', "True", NO_PREFIX),
        (PLANT, "    if lacking > 0:", "    if False:", NO_SLOT_LOST),
        (PLANT, "allocator.alloc(len(whole) - before)", "allocator.alloc(len(whole))", NO_SLOT_LOST),
        (PLANT, "prev_prefix_len=before", "prev_prefix_len=0", PLANTED + "a_planted_prefix_has_slots_of_its_own"),
        (
            PLANT,
            "is_bigram=pairs",
            "is_bigram=False",
            PLANTED + "requests_find_as_much_of_a_planted_prefix_as_their_phase_waits_for",
        ),
        (
            DRIVER,
            "phase.growth * self._slowest_s",
            "0",
            KV_UNIT + "driver.py::test_a_prompt_that_would_take_too_long_by_the_one_before_is_not_put",
        ),
        (
            KV + "phases.py",
            "_without_numbers(phase.name) in missed_words",
            "phase.name in missed",
            KV_UNIT
            + "phases.py::test_what_was_missed_is_tried_again_with_the_number_of_requests_that_there_is_room_for_now",
        ),
        (
            KV + "hooks.py",
            "self._limit_requests(order.limits)",
            "self._limit_requests(self._rehearsal and self._rehearsal.limits)",
            KV_UNIT + "growth.py::test_all_ranks_admit_as_many_requests_as_the_first_ones_rehearsal_has_found",
        ),
        (
            KV + "hooks.py",
            "self._seen.requests or self._requests",
            "self._requests",
            KV_UNIT + "growth.py::test_all_ranks_admit_as_many_requests_as_the_first_ones_rehearsal_has_found",
        ),
        (KV + "hooks.py", "str(error) or type(error).__name__", "str(error)", ALIKE),
        (
            SERVING,
            "self._pools.bytes_behind(wanted) < behind_goal",
            "wanted.tokens < self._goal",
            KV_UNIT + "serving.py::test_what_would_free_no_memory_is_not_ordered",
        ),
        (
            DRIVER,
            "while not (self._idle or self._ended):",
            "while False:",
            KV_UNIT + "driver.py::test_a_phase_begins_when_nothing_of_the_one_before_is_left",
        ),
        (
            SERVING,
            " or not set(with_penalties).isdisjoint(batch)",
            "",
            KV_UNIT + "admission.py::test_fewer_are_admitted_while_one_with_penalties_has_not_ended",
        ),
        (
            DRIVER,
            "            if not self._planted:",
            "            if False:",
            KV_UNIT + "driver.py::test_what_begins_with_a_prefix_that_a_cache_did_not_take_is_not_computed_instead",
        ),
        (
            DRIVER,
            "if phase.smaller and not",
            "if False and not",
            KV_UNIT + "driver.py::test_where_one_that_must_be_has_no_memory_nothing_of_it_is_put_and_nothing_further",
        ),
        (
            DRIVER,
            "            last_tokens = len(turn[0])\n",
            "",
            KV_UNIT + "rehearsal.py::test_a_longer_prompt_for_which_there_is_no_memory_is_not_put",
        ),
        (REHEARSAL, '*("forward_ct", ', "*(", KV_ENGINE + "whatever_a_scheduler_counts_is_as_before_after_a_rehearsal"),
        (
            REHEARSAL,
            "ignore_eos=True, **phase.sampling)",
            "ignore_eos=True)",
            KV_ENGINE + "a_request_asks_for_all_that_its_phase_is_about",
        ),
        (
            REHEARSAL,
            "return_logprob=phase.output_logprobs",
            "return_logprob=False",
            KV_ENGINE + "a_request_asks_for_all_that_its_phase_is_about",
        ),
        (
            REHEARSAL,
            "self._undo.append(partial(setattr, owner, name, copy(value)))",
            "pass",
            KV_UNIT + "rehearsal.py::test_what_is_counted_meanwhile_is_as_before",
        ),
        (
            REHEARSAL,
            'RECORDING = ("enable_metrics", ',
            "RECORDING = (",
            KV_UNIT + "rehearsal.py::test_a_scheduler_reports_no_metrics_meanwhile",
        ),
        (
            REHEARSAL,
            'self._meanwhile(self.scheduler, "max_queued_requests", None)',
            "pass",
            KV_UNIT + "rehearsal.py::test_what_waits_is_not_limited_meanwhile",
        ),
        (
            KV + "eligibility.py",
            'a.get("enable_lmcache")',
            'a.get("enable_lm_cache")',
            KV_ENGINE + "every_store_of_prompts_that_a_scheduler_may_make_is_named",
        ),
        (
            KV + "eligibility.py",
            'a.get("enable_flexkv")',
            'a.get("enable_flex_kv")',
            KV_ENGINE + "each_argument_that_kv_sizing_reads_is_one_of_the_engines",
        ),
        (
            SERVING,
            "any(not req.finished() for req in with_penalties)",
            "False",
            KV_UNIT + "admission.py::test_fewer_are_admitted_while_one_with_penalties_has_not_ended",
        ),
        (
            SERVING,
            "any(not req.finished() for req in with_penalties)",
            "bool(with_penalties)",
            KV_UNIT + "admission.py::test_fewer_are_admitted_while_one_with_penalties_has_not_ended",
        ),
        (
            SERVING,
            "most - running_bs",
            "most",
            KV_UNIT + "admission.py::test_fewer_are_admitted_while_one_with_penalties_has_not_ended",
        ),
    )
)


def run(folder: Path, *tests: str) -> tuple[str, str]:
    """How these tests of the copy in ``folder`` end: passed, killed or skipped; and what pytest said."""
    with tempfile.TemporaryFile("w+") as out:
        if not (child := os.fork()):
            os._exit(_run_here(folder, tests, out.fileno()))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        said = out.read()
    if code not in (0, 1):
        sys.exit(f"pytest could not run {', '.join(tests)}:\n{said}")
    return "killed" if code else "passed" if re.search(r"\d passed", said) else "skipped", said


def _run_here(folder: Path, tests: Sequence[str], out: int) -> int:
    """In a fork, which has imported nothing of the copy, nor of the engine. :returns: pytest's exit code."""
    import pytest

    for descriptor in (1, 2):
        os.dup2(out, descriptor)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder / "python")
    sys.path[0] = os.environ["PYTHONPATH"]
    sys.modules.pop("releases")  # this repository's, not the copy's
    if all(test.startswith(UNIT) for test in tests):
        for name in [name for name in os.environ if name.startswith("SGLANG")]:
            del os.environ[name]
    code = 2
    with suppress(BaseException):
        code = int(pytest.main(["-q", "-x", "-n", "0", "-m", "", "-p", "no:cacheprovider", *tests]))
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def tried(copy: Path, mutation: Mutation) -> str:
    """What becomes of a mutation in this copy, which is as it was afterwards."""
    whole = (ROOT / mutation.file).read_text()
    (copy / mutation.file).write_text(whole.replace(mutation.old, mutation.new))
    outcome, _ = run(copy, mutation.test)
    (copy / mutation.file).write_text(whole)
    return "SURVIVED" if outcome == "passed" else outcome


def main(words: list[str]) -> None:
    for name in PACKAGES:
        importlib.import_module(name)
    chosen = [each for each in MUTATIONS if all(word in each.file + each.test for word in words)]
    listed = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory() as folder:
        copy, survived = Path(folder), 0
        for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.splitlines()):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
        for kind in (UNIT, ENGINE):
            tests = dict.fromkeys(each.test for each in chosen if each.test.startswith(kind))
            outcome, said = run(copy, *tests) if tests else ("passed", "")
            if outcome == "killed":
                sys.exit(f"a test fails without a mutation:\n{said}")
        for each in chosen:
            outcome = "skipped" if each.until and ALL.index(each.until) < RELEASE else tried(copy, each)
            survived += outcome == "SURVIVED"
            print(outcome, each.file, repr(each.old), "->", repr(each.new), each.test, flush=True)
    if survived:
        sys.exit(f"{survived} of {len(chosen)} mutations survived")


if __name__ == "__main__":
    main(sys.argv[1:])
