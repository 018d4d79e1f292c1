"""Remove one guard after another from the code, and check that its test fails.

    make guards                    # all of MUTATIONS
    make guards ARGS="cutedsl"     # mutations with this text in the name of their file or test

The mutations run in a copy of the repository, in which the tests must pass first. Standard output has one line for each
mutation, in the order of the table:

- *killed*: the test failed.
- *SURVIVED*: the test passed, so it does not protect the guard.
- *skipped*: this release skips the test, or does not run the changed code (``until``).

Two commits are compared by::

    make -s guards > before        # on the first commit; on the second one, write to `after`
    diff before after

To add a mutation, append a row to ``TABLE``, under its file and a test that then fails. If a single case of the test is
enough, add the case's parameters in brackets. The row contains a text that occurs once in the file, and its
replacement. Run ``make guards`` with the file's name. If no test fails, add a case to the nearest table of cases. See
docs/development/guards.md.
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
"""Packages that tests take longest to import. One process imports them, and each mutation runs in a fork of it."""
OURS = "python/sglang_moe_patches/"
ENGINE, UNIT = "test/engine/", "test/unit/"


class Mutation(NamedTuple):
    """Removal of one guard: the text ``old``, which occurs once in ``file``, is replaced by ``new``. Then ``test`` must
    fail.

    :param test: name of the test, as pytest takes it.
    :param until: last engine release on which the test runs this code; "": the newest release.
    """

    file: str
    old: str
    new: str
    test: str
    until: str = ""


SWIZZLED_UNTIL = OFFERS_ALL_UNTIL = "0.5.12.post1"
"""Last release that allocates swizzled scales in addition to the loaded scales. It is also the last release without an
output buffer of its own.
"""
SIZED_UNTIL = "0.5.15.post1"
"""Last release that does not itself choose the right sizes for CuteDSL's buffers."""
FLAGS_UNTIL = "0.5.13"
"""Last release with several server arguments for CUDA graphs. Later releases have a single argument."""
SAID = "test_doctor_reports_what_the_engine_would_do"
TABLE: dict[str, dict[str, list[tuple[str, ...]]]] = {
    OURS + "core/dead_input/offer.py": {
        "test_a_layer_input_that_is_the_residual_is_not_offered": [
            ("and not shares_storage(hidden_states, residual)", "")
        ],
        "test_a_layer_with_a_forward_hook_offers_nothing": [("and not has_hooks(self)", "")],
        "test_the_engines_own_offer_overwrites_a_residual_and_ours_does_not": [
            ("lambda buf: nullcontext()", "lambda buf: original(buf)")
        ],
        "test_the_patched_server_is_correct_for_a_model_with_which_the_native_buffer_is_wrong": [
            ("lambda buf: nullcontext()", "lambda buf: original(buf)")
        ],
        "test_stock_and_patched_give_equal_answers_and_patched_uses_one_buffer": [
            ("channel.replace_offer(tensor.detach())", "channel.replace_offer(None)")
        ],
    },
    OURS + "core/dead_input/takers.py": {
        "test_the_moe_input_itself_is_never_written_into": [
            ("if buffer is None or shares_storage(buffer, dispatch_output.hidden_states):", "if buffer is None:")
        ],
    },
    OURS + "core/dead_input/channel.py": {
        "test_a_buffer_of_another_shape_is_not_used": [("buffer.shape == shape", "True")],
    },
    OURS + "lab/regress/compare.py": {
        "test_regress_calls_a_server_with_other_answers_worse": [
            ("if self.worse:\n            return WORSE", "if False:\n            pass")
        ],
    },
    OURS + "changes/cutedsl_sizing/wrapper.py": {
        "test_cutedsl_serves_a_prompt_beyond_the_budget_with_the_buffers_of_one_layer": [
            ("    if shares:", "    if False:"),
            ("shares and key in _shared", "False"),
            ("compute_max_forward_tokens(read_forward_limits(server_args, _largest_pools))", "128"),
        ],
    },
    OURS + "changes/fp4_weights/unread.py": {
        "test_unread_scales_take_no_memory_and_the_answer_is_the_same": [("and name not in read", "")],
        "test_scales_that_a_newer_release_may_read_stay": [
            ("and name not in read", ""),
            ("name in _find_changing_attributes(kind)", "False"),
            ("and not _is_named_elsewhere(type(method), type(layer), name)", ""),
            ("engine.require(not holds_layer,", "engine.require(True,"),
            ("engine.require(not replaced,", "engine.require(True,"),
            ("return function, *arguments, *keywords.values()", "return ()"),
            ('not hasattr(function, "__wrapped__")', "True"),
            ("not isinstance(called, FunctionType | property)", "True"),
            ("isinstance(vars(layer).get(attribute), dict)", "False"),
            ("return _UNKNOWN if _UNKNOWN in truths else not decisive", "return not decisive"),
            ("engine.require(not may_keep_layer,", "engine.require(True,"),
            ("self.attributes |= _Reader(function, known, subjects[0], self.callers).read()", ""),
            ('isinstance(name, ast.Constant), f"', 'True, f"'),
            ("                self.known[node.id] = _UNKNOWN", "                pass"),
        ],
    },
    OURS + "changes/fp4_weights/__init__.py": {
        "test_unread_scales_take_no_memory_and_the_answer_is_the_same": [
            (
                "result = original(self, layer, *args, **kwargs)\n    with best_effort(\"freeing a layer's",
                'free_unread_scales(layer)\n    result = original(self, layer)\n    with best_effort("x',
            )
        ],
        "test_zeros_follow_the_scales_on_hopper": [
            ("\n        append_zeros_to_scales(self)", "\n        pass"),
            ("data.new_zeros(", "data.new_empty("),
        ],
        "test_a_layer_leaves_no_holes_and_takes_at_most_a_quarter_of_its_weights": [
            (
                "            data = storage.data\n            in_parts.free_cached_memory()",
                "            in_parts.free_cached_memory()\n            data = storage.data\n            pass",
            )
        ],
        "test_freed_block_scales_leave_no_holes_when_layers_are_created": [
            ("            in_parts.free_cached_memory()  # no tensor of the next layer", "            # no tensor"),
        ],
        "test_a_scale_whose_memory_is_read_is_not_counted": [(" if storage.expired()", "")],
        "test_a_weight_update_ends_as_on_the_stock_server": [("    if loader is not None:", "    if False:")],
        "test_placeholders_are_not_allocated": [
            (
                "_make_placeholder(scale) if _no_swizzled_scales.get() else original(scale)",
                "original(scale)",
                SWIZZLED_UNTIL,
            )
        ],
        "test_marlin_keeps_no_scales_that_it_never_reads_and_no_list_of_experts": [
            ("            drop_swizzled_scales(layer)\n", ""),
        ],
        "test_scales_that_another_kernel_reads_stay": [
            ("if self._moe_runner_backend.value in runners.MARLIN:", "if True:")
        ],
        "test_a_hook_point_of_another_plugin_is_left_alone": [("    engine.require_unpatched(utils, _REPACK)\n", "")],
        "test_a_release_that_stacks_no_list_is_left_alone": [
            ('if engine.mentions(helper or prepare, _REPACK, "stack"):', "if True:")
        ],
    },
    OURS + "changes/fp4_weights/in_parts.py": {
        "test_parts_have_the_bits_shapes_and_strides_of_the_whole": [
            ("range(0, len(weight), layout.step)", "range(0, len(weight), max(1, layout.step - 1))"),  # parts overlap
            ("range(0, len(weight), layout.step)", "range(0, len(weight) - layout.step, layout.step)"),  # no last part
            ("torch.empty_strided(data.shape, data.stride(), dtype", "torch.empty(data.shape, dtype"),  # other strides
            ("as_strided(data.shape, data.stride(), 0)", "as_strided(data.shape, data.contiguous().stride(), 0)"),
        ],
        "test_weights_whose_memory_has_no_room_are_laid_out_elsewhere": [
            ("data.nbytes > begin + weight.nbytes", "False"),
        ],
        "test_weights_are_laid_out_in_the_memory_that_they_were_loaded_into": [
            (
                "    if layout is None:\n        return 0\n    storage",
                "    if True:\n        return 0\n    storage",
            ),
            ("memory = _find_memory(loaded, data)", "memory = None"),
        ],
        "test_weights_with_another_reference_are_not_laid_out_in_place": [
            ("weight.untyped_storage()._cdata not in shared", "True")
        ],
        "test_a_layer_leaves_no_holes_and_takes_at_most_a_quarter_of_its_weights": [
            ("step = max(1, experts // PARTS)", "step = experts"),
            ('layouts.get(name.removesuffix("_scale"))', "layouts.get(name)"),
        ],
        "test_a_release_may_create_other_values": [
            ("            self._fills.clear()", "            pass"),
            ("            data.fill_(fills[name])", "            pass"),
        ],
        "test_zeros_follow_the_scales_on_hopper": [("_SCALE_BYTES_AT_ONCE = 128", "_SCALE_BYTES_AT_ONCE = 64")],
        "test_a_release_that_reads_loaded_weights_again_is_left_alone": [("read == [*WEIGHTS] and ", "")],
    },
    OURS + "changes/fp4_weights/repack.py": {
        "test_experts_are_repacked_in_place_with_the_same_bits": [
            ("if function is torch.stack:", "if False:"),
            (
                "self._written_experts.append(memory.view(result.shape).copy_(result))",
                "self._written_experts.append(result)",
            ),
        ],
        "test_weights_with_another_reference_are_not_repacked_in_place": [
            (" if _count_references(layer._parameters, name) != unshared", " if False"),
            ("sys.getrefcount(parameters[name])", "0"),
            ("torch._C._storage_Use_Count(memory._cdata)", "0"),
            (", *self._protected_storages)", ",)"),
        ],
        "test_experts_repacked_in_another_order_are_stacked_by_the_engine": [
            (" and _lie_in_order(experts)", ""),
            ("_are_same_tensors(args[0], experts)", "experts"),
        ],
        "test_weights_that_a_newer_release_reads_again_are_not_overwritten": [
            ("engine.require(repacked == [*_LOCALS],", "engine.require(True,"),
            ("node in inside or ", ""),
            ("or node.lineno >= calls[0].lineno", ""),
            ("*_LOCALS, *WEIGHTS", "*_LOCALS,"),
            ('and "layer" in map(ast.unparse, arguments)', "and False"),
        ],
        "test_an_expert_that_a_newer_release_reads_twice_is_not_overwritten": [
            ("engine.require(sorted(read) ==", "engine.require(True or sorted(read) ==")
        ],
    },
    "test/tools/processor_time.py": {
        "test_a_test_that_takes_too_long_with_its_child_processes_fails_unless_marked": [
            ("taken_s > (limit_s := LIMIT_S * measure_slowdown())", "False"),
            ("this.children(recursive=True)", "this.children()"),
            ('fixturedef.scope == "session"', "False"),
            ('item.get_closest_marker("long") is not None or ', ""),
        ],
    },
    "test/standins/preloaded/sitecustomize.py": {
        "test_a_spawned_process_is_forked_with_its_environment_and_its_failure_ends_the_server": [
            ("staticmethod(context.ForkServerProcess._Popen)", "staticmethod(context.SpawnProcess._Popen)"),
            ("staticmethod(context.ForkServerProcess._Popen)", "context.ForkServerProcess._Popen"),
            ('os.environ.update(data.pop("environ"))', 'data.pop("environ")'),
            ("os.kill(os.getppid(), signal.SIGQUIT)", "None"),
            ("ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)", ""),
        ],
    },
    OURS + "lab/doctor.py": {
        "test_doctor_says_what_a_server_of_this_environment_says": [
            ("if engine.is_plugin_left_out():", "if False:"),
            ("_arguments_without_flags() if change.name in names else None", "None"),
        ],
    },
    OURS + "lab/predict/engine_query.py": {
        SAID + "[gathered from four ranks, 4,096 tokens each]": [("attention_ranks(resolved)\n", "1\n")],
        SAID + "[a given fraction below the weights]": [("parsed.mem_fraction_static is not None", "False")],
        SAID + "[the last of two stages]": [("resolved.pp_size * (dense_layers", "(dense_layers")],
        SAID + "[an input of one rank's tokens]": [("if traced or ranks * inner > hidden:", "if traced:")],
        SAID + "[the dead input in a traced prefill]": [
            ("if traced or ranks * inner > hidden:", "if False:", FLAGS_UNTIL)
        ],
        SAID + "[FP8 on TRT-LLM, whose output is copied]": [
            ('len(engine.find_calls(run, "symm_output.copy_")) if run else 0', "0", FLAGS_UNTIL)
        ],
        SAID + "[FP8 by loading]": [("return 1 if by_loading and", "return size if by_loading and")],
        SAID + "[weights on the host]": [('(resolved.get("cpu_offload_gb") or 0)', "0")],
        SAID + "[the last of four stages]": [("max(range(len(stages)), key=by_stage.__getitem__)", "0")],
        SAID + "[linear attention in FP8]": [("vars(made).update(given)", "pass")],
        SAID + "[a GPU that shares its memory]": [(", 48, integrated=True", ", 48")],
        SAID + "[no graphs of prefills]": [
            ('resolved["disable_cuda_graph"] or resolved["disable_piecewise_cuda_graph"]', "False", FLAGS_UNTIL)
        ],
        SAID + "[graphs of prefills that are off by themselves]": [('None if settings["off"]', "None if False")],
        SAID + "[NVFP4 on TRT-LLM]": [('name.endswith("_blockscale_swizzled")', "False", SWIZZLED_UNTIL)],
        SAID + "[MXFP4 experts, whose loading leaves pieces]": [("loading=found.kept_bytes, ", "")],
        SAID + "[MXFP4 experts that the stock server cannot load]": [(", layout=found.transient", "")],
        SAID + "[DeepSeek-V4's experts on Marlin]": [
            ('type(quantization).__name__.startswith("Mxfp4")', "False", SWIZZLED_UNTIL)
        ],
        SAID + "[DeepEP]": [("    if create is not None:\n", "    if False:\n")],
        SAID + "[a KV cache of another kind]": [("skip_reason or why_not_pools", "skip_reason")],
        SAID + "[a KV cache that the engine cannot be asked for]": [("fit.unknown if fit else unknown", '""')],
        SAID + "[out of place by the engine]": [('"in_place": runners.is_in_place(experts)', '"in_place": True')],
    },
    OURS + "lab/predict/model_report.py": {
        SAID + "[a chunk that is larger than the graphs of prefills]": [("and server.tokens <= graphs[1]", "")],
        SAID + "[prefill alone]": [('source = "the given --mem-fraction-static" if given else', "source =")],
        "test_effects_on_a_layer_that_could_not_be_built_are_unknown": [
            ("if change.decide and decision is None:", "if False:")
        ],
        "test_the_weight_format_follows_from_the_engines_quantization_class": [('if layer.get("mxfp4"):', "if False:")],
        "test_fp4_weights_acts_by_format_and_runner": [
            ("if server.runner not in LAYOUT_RUNNERS[server.format]:", "if False:")
        ],
        "test_a_variable_that_this_server_does_not_read_is_named": [('if row["status"] == Status.NOT_NEEDED', "")],
        "test_effects_in_the_report_follow_the_changes_decisions": [
            ('or (SHARED_LAST in effects and server.runner == "triton" and bool(server.family))', "")
        ],
    },
    OURS + "changes/fp4_weights/sizes.py": {
        "test_loading_takes_memory_by_runner_and_format": [("0 if patched else unread", "unread")],
        "test_the_memory_of_loading_is_as_it_was_measured": [("_TEMPORARIES * w13, growth)", "_TEMPORARIES * w13)")],
    },
    OURS + "lab/predict/room.py": {
        "test_the_verdict_compares_room_and_need": [("if self.free < self.need.graphs:", "if False:")],
    },
    OURS + "lab/predict/engine_pools.py": {
        SAID + "[a GPU that shares its memory]": [
            ('vars(psutil)["virtual_memory"] = lambda: SimpleNamespace(available=free)', "pass")
        ],
        SAID + "[sliding windows]": [("_resolve_pools(maker, fit, fit.memory - fit.loaded)", "None")],
        SAID + "[four ranks on H200s]": [("HELD_BYTES = 1_200_000_000", "HELD_BYTES = 0")],
        "test_a_model_that_does_not_load_does_not_start_with_any_fraction": [
            ("return self.loads and (", "return ("),
            ("        if not self.loads:\n            return None\n", ""),
        ],
        SAID + "[a KV cache of another kind]": [(" or unknown_pool_reason(*_pool_classes(maker, config))", "")],
        SAID + "[a rule that leaves nothing, and a cache that is grown]": [
            ("if sizes and not skip_reason and not fit.given:", "if False:")
        ],
    },
    OURS + "changes/output_buffer.py": {
        SAID + "[NVFP4 on TRT-LLM]": [('"" if taking else reason', "reason")],
        SAID + "[an activation that is too large for the dead input]": [
            ("[OUTPUT_IN_DEAD_INPUT] if taking", "[OUTPUT_IN_DEAD_INPUT] if offering")
        ],
        SAID + "[BF16 on TRT-LLM]": [(" and _has_attention_inputs(built.model)", "", OFFERS_ALL_UNTIL)],
    },
    OURS + "memory/kv_sizing/pools.py": {
        "test_only_the_tokens_of_the_rule_have_memory_at_first": [
            ("= first, top, page, first", "= first, top, page, top")
        ],
        "test_free_rows_of_the_request_table_contain_no_unmapped_slot": [
            ("            _reset_free_rows(table)\n", "            pass\n"),
            ("[0, *map(int, table.free_slots)]", "range(len(rows))"),
        ],
        "test_tokens_with_window_give_the_windows_at_least_the_wanted_tokens": [
            ("self.counts_for(number * self.page).window)", "number * self.page)")
        ],
        "test_an_unsupported_pool_is_named_and_its_buffers_are_freed": [("if fixed & ours:", "if False:")],
    },
    OURS + "core/runners.py": {
        "test_find_runner_names_the_kernel_that_runs": [
            ('else "cutlass"\n', "else None\n"),
            ('if engine.mentions(apply, "runner") else ""', ""),
        ],
        "test_addresses_outside_the_pool_are_checked_again": [
            ("        if is_inside:\n            if", "        if True:\n            if")
        ],
    },
    OURS + "changes/moe_workspace/decision.py": {
        SAID + "[a top-k of 2]": [
            ("not triton.can_run_in_columns(tokens, top_k, hooks=None, defer_sum=False)", "False")
        ],
        SAID + "[an activation that is too large for the dead input]": [(" and rows * inner <= tokens * hidden", "")],
        SAID + "[Marlin, where a slice costs too much]": [('cut=effect, uncut=""', "cut=effect, uncut=effect")],
        SAID + "[Marlin, cut because it is asked for]": [
            ("_make_meta_tensor(tokens, hidden) if offered else None", "None")
        ],
        SAID + "[Marlin, which may hold as much]": [("if max_bytes is not None and", "if False and")],
    },
    OURS + "changes/deferred_shared_experts.py": {
        SAID + "[FP8 on TRT-LLM, which the engine defers behind]": [("if None in reasons:", "if False:")],
    },
    OURS + "changes/cutedsl_sizing/__init__.py": {
        SAID + "[NVFP4 on CuteDSL]": [("((OUTPUT_IN_DEAD_INPUT,) if takes else ())", "()", SIZED_UNTIL)],
    },
    OURS + "memory/kv_sizing/engine_rule.py": {
        "test_a_larger_first_fraction_also_gives_room_to_the_caches_for_images": [
            (" + (images_gib or 0.0) * GIB", ""),
            ("if has_images else None", ""),
        ],
    },
    OURS + "memory/kv_sizing/start.py": {
        "test_a_server_starts_if_the_rule_leaves_no_kv_cache": [(" - self.reservation.raised_tokens", "")],
        "test_a_failed_later_rehearsal_restores_the_engines_size": [
            (
                "return min(tokens, first), reason, False",
                "return min(tokens, first), reason, any(n.stopped for n in known)",
            ),
            ("return min(tokens, first), reason, False", "return tokens, reason, False"),
        ],
        "test_a_rank_that_is_silent_after_growth_restores_the_engines_size": [("return min(now, first)", "return now")],
        "test_all_ranks_shrink_together_if_the_driver_of_one_rank_cannot_unmap": [
            ("serving.unmap_or_warn(self.pools, counts)", "self.pools.unmap_from(counts)"),
        ],
        "test_all_ranks_grow_to_the_same_size_or_no_rank_grows": [
            ("tokens = before  # a rank", "pass  # a rank"),
            ("        serving.unmap_or_warn(self.pools, counts)\n        return problem", "        return problem"),
            ("            return str(error) or type(error).__name__", "            return ''"),
            ("str(error) or type(error).__name__", "str(error)"),
        ],
        "test_a_size_that_no_fraction_gives_is_used_and_logged_without_a_fraction": [
            ("if fraction and not hybrid and now != rule:", "if True:")
        ],
        "test_phases_that_became_larger_are_rehearsed_again_and_the_kv_cache_shrinks": [
            ("rehearse_again, missed = True, ()", "rehearse_again, missed = False, ()")
        ],
        "test_the_need_of_an_earlier_rehearsal_still_counts_after_a_later_one": [
            ("max(self._need, without_forwards - measured.lowest)", "without_forwards - measured.lowest"),
            ("self._bytes_before or without_forwards", "without_forwards"),
        ],
        "test_a_rehearsal_starts_over_if_unrequested_requests_make_the_kv_cache_too_small": [
            ("self._begin_next(phases.derive_phases)", "self._begin_next(lambda limits: [])"),
            ("(is_smaller or ended_early)", "ended_early"),
            ("(is_smaller or ended_early)", "is_smaller"),
        ],
        "test_a_rehearsal_that_starts_over_has_fewer_requests_and_two_more_passes": [
            (
                "        self._need = self._bytes_before = self._slack_bytes = 0\n        self._phases",
                "        self._phases",
            ),
            ("        self._phases.clear()\n", ""),
            ("self._has_started_over, self._limits_penalized = True,", "self._limits_penalized ="),
            ("        if self._pass > 1:\n            return None\n", ""),
            ("        self._fewer_requests = requests\n", ""),
        ],
        "test_a_server_of_unchanged_size_has_the_stock_request_limit_unless_it_started_over": [
            (" and not self._has_started_over)", ")")
        ],
        "test_rank_0_ends_a_rehearsal_that_it_does_not_drive": [
            ("            self._step.end()\n", ""),
            ("self._start.send(None)  # it", "pass  # it"),
        ],
        "test_an_estimated_need_counts_until_the_phase_has_run": [
            ("without_forwards - measured.lowest)", "without_forwards - min(measured.lowest, measured.expected))")
        ],
        "test_schedulers_sleep_only_after_the_start_and_without_work": [
            ('self._sleeper.add(self.scheduler, "idle_sleeper", sleeper)', "pass"),
        ],
        "test_a_rehearsed_forward_pass_that_raises_on_all_ranks_does_not_end_the_server": [
            ("or self._limits.stages > 1", ""),
            ("        drop_requests(self.scheduler)\n", ""),
            ("return None not in self.board", "return True or self.board"),
        ],
        "test_all_ranks_get_the_request_limit_of_rank_0": [
            (
                "batch, penalized = rank_0.request_limits",
                "batch, penalized = self._limits.batch, self._limits.penalized",
            ),
            ("(self.pools.counts == self.pools.first and not", "(not"),
            ("measured.fewer_requests or self._fewer_requests", "self._fewer_requests"),
            ("            bytes_per_token=self.reservation.bytes_per_token,\n", ""),
            (
                "            margin=self.margin,\n        )\n        self._rehearsal.begin",
                "        )\n        self._rehearsal.begin",
            ),
        ],
    },
    OURS + "memory/kv_sizing/sizing.py": {
        "test_all_ranks_get_the_size_that_fits_on_the_rank_with_least_memory": [
            ("min(need.fits for need in needs)", "max(need.fits for need in needs)"),
            ("if fits > now and needs[0].missed:", "if False:"),
            ("min(now, least)", "min(now, 1)"),
        ],
    },
    OURS + "memory/kv_sizing/serving.py": {
        "test_prefixes_in_the_tail_are_evicted_while_memory_is_short": [
            (
                "shortage, prefixes_hold_tail = 0, bool(shortage) or is_idle(",
                "shortage, prefixes_hold_tail = 0, is_idle(",
            )
        ],
        "test_a_pipeline_stage_with_a_running_prefill_is_not_flushed": [
            ("            if is_idle(self._scheduler):\n", "            if self._scheduler.is_fully_idle():\n")
        ],
        "test_slots_that_a_chunked_prompt_needs_are_not_withdrawn": [
            ("retirement.advance(spare_tokens(self._scheduler))", "retirement.advance()"),
            ("in_tail &= in_tail.cumsum(0) <= most", "pass"),
        ],
        "test_with_mixed_chunks_decoding_requests_keep_slots_for_the_rest_of_the_prompt": [
            ('if getattr(scheduler, "is_mixed_chunk", False):', "if False:")
        ],
        "test_sliding_window_layers_keep_room_for_a_window_and_a_prefill": [("if not pools.top.window:", "if True:")],
        "test_slots_stay_withdrawn_if_the_driver_cannot_unmap": [
            (
                '    except Exception as error:\n        problem = "could not unmap',
                '    except ZeroDivisionError as error:\n        problem = "could not unmap',
            )
        ],
        "test_in_every_turn_free_and_held_slots_add_up_to_the_engines_number": [
            ("return pages[~in_tail] if len(withdrawn) else pages", "return pages"),
            ("self.held[withdrawn.cpu() - self.kept - 1] = False", "pass"),
            ("        if has_changed:", "        if False:"),
            ("tail.held[:] = False", "pass"),
        ],
        "test_held_slots_are_withdrawn_later_and_all_of_them_after_a_flush": [
            ("any(withdrawals) or self._was_flushed", "any(withdrawals)"),
            ("self._orders.send(EvictPrefixes())", "pass"),
        ],
        "test_after_the_tail_is_freed_the_allocator_equals_a_new_one_of_that_size": [
            ("int(held[-1]) + 1 if len(held) else 0", "len(held)")
        ],
        "test_both_parts_of_a_sliding_window_cache_are_withdrawn": [
            (
                "[tail.withdraw(spare) for tail in self._tails.values()]",
                "(tail.withdraw(spare) for tail in self._tails.values())",
            )
        ],
        "test_below_half_of_the_margin_memory_is_short_by_the_rest_of_the_whole_margin": [
            ("if free < LOW_MARGIN_FRACTION * self.margin else", "if free < self.margin else")
        ],
        "test_the_tail_is_freed_until_the_whole_margin_is_free": [("if not self._order_is_pending and (", "if (")],
        "test_prefixes_of_another_rank_are_flushed_when_it_is_idle": [
            ("if self._retirement is None:  # another", "if False:  # another"),
            ("prefixes_hold_tail or self._board.is_raised(held_report)", "prefixes_hold_tail"),
            (" {self._evict_orders}", ""),
        ],
        "test_the_kv_cache_keeps_room_for_two_prefills_and_rank_0s_longest_request": [
            (
                "bound = max(self._longest_request(), floor_tokens(self._scheduler, self._pools))",
                "bound = self._longest_request()",
            ),
            (
                "bound = max(self._longest_request(), floor_tokens(self._scheduler, self._pools))",
                "bound = floor_tokens(self._scheduler, self._pools)",
            ),
            ("if frees or repeat:", "if True:"),
            ("self._pools.backing_bytes(wanted) < behind_goal", "wanted.tokens < self._goal"),
        ],
        "test_each_rank_keeps_room_for_its_own_longest_request_until_it_has_ended": [
            ("max(self._goal, self._longest_request())", "self._goal"),
            ("return needed + self._extra_tokens_per_request if", "return needed if"),
            ('"grammar_queue", ()', '"no_queue", ()'),
            ("if self._goal < self._pools.counts.tokens:  #", "if False:  #"),
        ],
        "test_a_second_order_is_obeyed_after_the_first": [
            ("if self._retirement is None and self._goal", "if self._goal")
        ],
        "test_rank_0_orders_once_if_another_rank_is_short": [
            ("max(shortage, int(self._memory.margin * LOW_MARGIN_FRACTION))", "shortage"),
            (
                "self._order_is_pending, self._retire_orders = False, self._retire_orders + 1",
                "self._order_is_pending = False",
            ),
            ("frees or repeat:", "frees:"),
        ],
        "test_a_failing_gpu_driver_ends_only_the_watch_of_free_memory": [
            ("self._failures.add(failure)", "pass"),
            ("if failure in self._failures:", "if self._failures:"),
        ],
        "test_slots_of_streaming_sessions_are_never_freed": [
            ("        return 2 * largest + session_tokens\n", "        return 2 * largest\n"),
            ("needed = longest + round_up_to_pages(session_tokens.values(), page)", "needed = longest"),
            ("max(tokens, session_tokens.get(session.session_id, 0))", "session_tokens.get(session.session_id, 0)"),
            ('getattr(record, "kv", record)', "record"),
        ],
        "test_fewer_requests_are_admitted_while_a_penalized_one_waits": [
            ("free = rows - running_bs\n", "free = rows\n"),
            ("            self._penalized_queue.append(request)\n            self.rows = None\n", "            pass\n"),
            ("            self.rows = None\n\n    def derive", "\n    def derive"),
        ],
        "test_a_penalized_request_that_left_the_queue_does_not_count_even_if_a_session_keeps_it": [
            ("            penalized.popleft()\n", "            break\n")
        ],
        "test_fewer_requests_are_admitted_to_a_penalized_batch": [
            ("or batch_is_penalized(self.batch)", ""),
            ("    if not batch.reqs:\n", "    if False:\n"),
            ("        or sampling.need_min_p_sampling\n", ""),
        ],
        "test_the_limit_follows_the_batch_that_the_requests_join": [
            ('args[0] if args else kwargs["running_batch"] if kwargs else', 'kwargs["running_batch"] if kwargs else')
        ],
        "test_a_penalized_prompt_of_several_chunks_counts_until_it_joins_the_batch": [
            (" or (chunked is not None and is_penalized(chunked))", "")
        ],
        "test_the_limit_is_derived_once_a_turn_and_the_queue_is_searched_only_for_penalized_requests": [
            ("        if rows is None:\n            rows = limit.derive()", "        rows = limit.derive()")
        ],
        "test_the_beams_of_a_request_are_rows_of_the_batch_and_count_as_penalized": [
            ("        or beam_width(request) > 1\n", ""),
            ("- sum(beam_width(request) - 1 for request in running)", ""),
            ("*filter(None, [scheduler.chunked_req])", ""),
        ],
        "test_a_request_with_more_beams_than_may_run_runs_alone": [
            ("return rows if running else max(rows, self.widest)", "return rows")
        ],
        "test_each_beam_of_a_request_keeps_its_own_new_tokens": [("new * beam_width(request)", "new")],
    },
    OURS + "memory/kv_sizing/load_driver.py": {
        "test_the_radix_cache_finds_only_the_intended_prefix_in_prompts": [
            (
                "return [next(self._first_tokens), *tokens.draw(length - 1)] if length else []",
                "return tokens.draw(length)",
            )
        ],
        "test_the_next_smaller_request_limit_is_known_wherever_a_rehearsal_ends": [
            ("phase.kind is PhaseKind.EAGER_DECODE and phase", "phase"),
            ("and phase.bound.requests > self.limits.penalized\n", "\n"),
            (" and self.limits.stages == 1:", ":"),
            ("max(self.limits.penalized, self._most_requests)", "self._most_requests"),
        ],
        "test_each_pipeline_stages_batch_has_its_share_of_fewer_requests": [
            (
                "self.limits.with_requests(self.fewer_requests)",
                "replace(self.limits, requests=self.fewer_requests)",
            )
        ],
        "test_requests_that_a_server_will_not_admit_are_aborted_and_the_next_phase_begins": [
            ("yield [self._abort()] if self._is_stuck else", "yield"),
            ("if self._is_ended or self._is_stuck:", "if self._is_ended:"),
        ],
        "test_a_prompt_that_would_take_too_long_is_not_sent": [("phase.growth * self._slowest_s", "0")],
        "test_a_phase_begins_when_the_phase_before_has_ended": [
            ("while not (self._is_idle or self._is_ended):", "while False:")
        ],
        "test_a_short_request_displaces_the_memory_of_a_decode_without_a_graph": [
            ("phase.bound.modes == DECODES and not", "not"),
            ("phase.bound.modes == DECODES and not phase.bound.graph:", "phase.bound.modes == DECODES:"),
            ("yield from self._replace_last_decode(phase)", "pass"),
            ("while not self._is_idle:  # else", "while False:  # else"),
            ('name="", sampling=SAMPLING, output', 'name="", output'),
        ],
        "test_a_phase_whose_prefix_was_not_planted_is_not_computed": [
            ("            if not self._is_planted:", "            if False:")
        ],
        "test_a_required_phase_without_memory_ends_the_rehearsal": [
            ("if phase.estimate is not None and not", "if False and not"),
            ("if phase.name in self.seconds and", "if"),
        ],
        "test_a_prompt_without_memory_is_not_sent": [("            last_tokens = len(turn[0])\n", "")],
    },
    OURS + "memory/kv_sizing/engine_objects.py": {
        "test_server_facts_depend_on_the_kind_of_pool": [
            ('getattr(runner, "token_to_kv_pool_allocator", None)', "pool")
        ],
        "test_a_request_has_the_sampling_parameters_of_its_phase": [
            ("ignore_eos=True, **phase.sampling)", "ignore_eos=True)"),
            ("return_logprob=phase.output_logprobs", "return_logprob=False"),
        ],
    },
    OURS + "memory/kv_sizing/rehearsal.py": {
        "test_a_large_decode_is_rehearsed_if_it_fits_and_without_a_user_limit_only_if_it_costs_little": [
            ("return cost <= self._for_more_requests and free_bytes", "return free_bytes"),
            ("if self._reserved_by_others is None:", "if True:"),
            ("+ taken_next - peak_bytes\n", "\n"),
            ("free_bytes >= self._margin + MIN_FREE_BYTES", "True"),
            ("limits.cache_tokens * MORE_REQUESTS_FRACTION", "0"),
            ("peak_bytes += graph_bytes(self.runner)", "pass"),
            ("if free_bytes >= MIN_FREE_BYTES:", "if free_bytes >= 0:"),
        ],
        "test_the_next_smaller_request_limit_is_known_if_a_decode_leaves_little_memory": [
            ("restart_requests=driver.restart_requests if driver else 0", "restart_requests=0")
        ],
        "test_waiting_requests_count_as_stuck_after_a_long_time_without_a_batch": [
            ("bool(scheduler.waiting_queue) and not runs", "not runs"),
            ("            self._last_forward = time.monotonic()\n", ""),
            ("scheduler.chunked_req is not None or ", ""),
        ],
        "test_every_counter_of_a_scheduler_is_restored_after_a_rehearsal": [('*("forward_ct", ', "*(")],
        "test_counters_are_restored": [("self._undo.append(partial(setattr, owner, name, copy(value)))", "pass")],
        "test_metrics_and_the_queue_limit_are_off_during_a_rehearsal": [
            ('METRIC_SWITCHES = ("enable_metrics", ', "METRIC_SWITCHES = ("),
            ('self._set_until_end(self.scheduler, "max_queued_requests", None)', "pass"),
        ],
    },
    OURS + "memory/kv_sizing/ranks.py": {
        "test_a_key_that_another_process_writes_has_no_effect": [
            ('hmac.compare_digest(digest, self._digest("value", topic, rank, text))', "True"),
        ],
        "test_a_copied_value_under_another_topic_rank_or_start_is_ignored": [
            ("json.dumps(parts)", "json.dumps(parts[-1:])")
        ],
        "test_a_published_value_of_another_type_is_refused": [
            ("math.isfinite(value)", "True"),
            ("    require(type(value) is kind)\n", ""),
            ("isinstance(value, dict) and value.keys() == hints.keys()", "True"),
        ],
        "test_forged_answers_of_machines_turn_sizing_off_in_a_bounded_time": [
            ("    _connect(store, rank, ranks)\n    return True", "    return True")
        ],
        "test_orders_precede_waiting_requests_if_a_turn_reads_few_requests": [
            ("                inbox.end_turn()\n", "                pass\n")
        ],
    },
    OURS + "memory/kv_sizing/phases.py": {
        "test_no_rehearsed_request_asks_for_min_p_if_each_request_is_sampled_with_a_seed": [
            ('        del sampling["min_p"]', "        pass")
        ],
        "test_the_logit_bias_names_a_token_of_a_small_vocabulary": [
            ("min(BIASED_TOKEN, limits.vocabulary - 1)", "BIASED_TOKEN")
        ],
        "test_each_pipeline_stages_batch_has_its_share_of_fewer_requests": [
            ("micro_batch=min(self.micro_batch, share)", "micro_batch=self.micro_batch")
        ],
        "test_the_radix_cache_finds_only_the_intended_prefix_in_prompts": [
            (" if token != taken", ""),
        ],
        "test_no_chunk_ends_within_a_prompt_of_a_decode": [
            ("longest -= longest % limits.short_prompt_tokens", "pass"),
            (
                "prompts=[Prompt(longest - limits.short_prompt_tokens, limits.short_prompt_tokens),",
                "prompts=[Prompt(longest, 0),",
            ),
            ("math.gcd(self.chunk or SHORT_PROMPT_TOKENS, SHORT_PROMPT_TOKENS)", "SHORT_PROMPT_TOKENS"),
        ],
        "test_one_long_request_and_the_short_requests_fit_into_the_kv_cache_together": [
            ("min(short.new_tokens, max_new_tokens(limits.requests, half, wanted))", "min(short.new_tokens, wanted)"),
            ("limits.cache_tokens // 2, room)", "limits.cache_tokens // 2)"),
        ],
        "test_missed_phases_are_tried_again_with_the_requests_that_fit_into_the_new_size": [
            (" or phase.kind in missed", "")
        ],
    },
    OURS + "memory/kv_sizing/address_space.py": {
        "test_mapping_and_unmapping_the_tail_keeps_addresses_and_values_and_zeroes_new_memory": [
            (" if number not in self._mapped]", "]"),
            ("sorted(self._mapped - needed)", "[]"),
        ],
        "test_without_enough_memory_no_mapping_changes": [
            ("self._memory.unmap(*self._extent(run))\n            raise", "pass\n            raise")
        ],
        "test_exactly_the_granules_of_the_first_rows_of_every_plane_are_mapped": [
            ("before = max(before, granules.stop)", "pass")
        ],
    },
    OURS + "memory/kv_sizing/token_count.py": {
        "test_an_allocator_that_already_has_the_size_is_not_cleared": [
            ("    if any(owner.size != getattr(counts, part) for part, owner in parts_of(allocator)):", "    if True:")
        ],
        "test_a_request_that_would_not_fit_at_the_goal_is_refused": [
            (" if longest_request is None else longest_request", "")
        ],
    },
    OURS + "memory/kv_sizing/eligibility.py": {
        "test_nothing_is_hooked_without_the_variable": [(", can_be_enabled=not mode", "")],
        "test_kv_sizing_reads_every_argument_that_selects_an_external_store_of_prompts": [
            ('UnsizedKind("--enable-lmcache"', 'UnsizedKind("--enable-lm-cache"')
        ],
        "test_each_argument_that_kv_sizing_reads_exists_in_the_engine": [
            ('UnsizedKind("--enable-flexkv"', 'UnsizedKind("--enable-flex-kv"')
        ],
    },
    OURS + "memory/kv_sizing/planted_prefix.py": {
        "test_nothing_is_planted_into_a_cache_that_needs_more_than_a_prefix": [
            ("type(tree).__name__ in CACHES\n        and ", ""),
            ("        and not tree.disable\n", ""),
            ('        and parts == ["FULL"]\n', ""),
            ("        and int(tree.page_size) == int(allocator.page_size)\n", ""),
            ('getattr(tree, "cache_controller", None) is None', "True"),
        ],
        "test_planting_loses_no_slot_and_duplicates_none_whatever_is_cached": [
            ("    if missing > 0:", "    if False:"),
            ("allocator.alloc(len(whole) - before)", "allocator.alloc(len(whole))"),
        ],
        "test_a_planted_prefix_has_its_own_slots": [("prev_prefix_len=before", "prev_prefix_len=0")],
        "test_requests_find_as_much_of_a_planted_prefix_as_their_phase_needs": [("is_bigram=pairs", "is_bigram=False")],
    },
}
"""Mutations, by the file that they change and by the test that must then fail. A mutation is a tuple of two texts: a
text in the file, and its replacement. If newer releases do not run the changed code, a third text names the last
release that runs it.
"""


def _files_of_tests() -> dict[str, str]:
    """Map the name of each test to its file."""
    files = [file for kind in (UNIT, ENGINE) for file in sorted((ROOT / kind).rglob("test_*.py"))]
    names = {file: re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE) for file in files}
    return {name: file.relative_to(ROOT).as_posix() for file in files for name in names[file]}


FILES_OF_TESTS = _files_of_tests()
MUTATIONS = tuple(
    Mutation(file, old, new, f"{FILES_OF_TESTS[test.partition('[')[0]]}::{test}", *until)
    for file, tests in TABLE.items()
    for test, rows in tests.items()
    for old, new, *until in rows
)


def run(folder: Path, *tests: str) -> tuple[str, str]:
    """Run tests of the copy of the repository in ``folder``.

    :returns: ``passed``, ``killed`` or ``skipped``, and pytest's output.
    """
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
    """Run tests in this process. It must be a fork that has imported neither the engine nor a module of the copy.

    :param folder: copy of the repository.
    :param out: file descriptor for pytest's output.
    :returns: pytest's exit code.
    """
    import pytest

    for descriptor in (1, 2):
        os.dup2(out, descriptor)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder / "python")
    sys.path[0] = os.environ["PYTHONPATH"]
    # Write no bytecode. If two mutations of a file have the same length and follow within a second, Python would run
    # the bytecode of the first mutation again.
    sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
    sys.modules.pop("releases")  # this script imported it from the repository, and the tests must import the copy
    if all(test.startswith(UNIT) for test in tests):
        for name in [name for name in os.environ if name.startswith("SGLANG")]:
            del os.environ[name]
    code = 2
    with suppress(BaseException):
        code = int(pytest.main(["-q", "-x", "-n", "0", "-m", "", "-p", "no:cacheprovider", *tests]))
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def try_mutation(copy: Path, mutation: Mutation) -> str:
    """Apply a mutation to the copy of the repository, run its test, and undo the mutation.

    :returns: ``killed``, ``SURVIVED`` or ``skipped``.
    """
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
            outcome = "skipped" if each.until and ALL.index(each.until) < RELEASE else try_mutation(copy, each)
            survived += outcome == "SURVIVED"
            print(outcome, each.file, repr(each.old), "->", repr(each.new), each.test, flush=True)
    if survived:
        sys.exit(f"{survived} of {len(chosen)} mutations survived")


if __name__ == "__main__":
    main(sys.argv[1:])
