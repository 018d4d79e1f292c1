"""Take guards of docs/development/guards.md out, one after the other, and see whether their tests fail.

    make guards                    # all of MUTATIONS
    make guards ARGS="cutedsl"     # those whose file or test has this in its name

In a copy of the repository, where the tests must pass first. A line for each mutation: *killed*, *SURVIVED*, or
*skipped*, where this release skips the test.

To add one, append a row to ``MUTATIONS``: the file, text that is there once, what takes its place, and one test that
fails then, with its parameters in brackets if a single case is enough. Run ``make guards`` with the file's name, and
name what was broken in the test's line of guards.md. What tests miss needs another case, in the table nearest to it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from releases import ROOT

OURS = "python/sglang_moe_patches/"
ENGINE, UNIT = "test/engine/", "test/unit/"


class Mutation(NamedTuple):
    """``old``, which is once in ``file``, becomes ``new``, and ``test`` (as pytest names it) must fail."""

    file: str
    old: str
    new: str
    test: str


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
REPORTED = UNIT + "lab/predict/test_model_report.py::test_"
KV, KV_UNIT = OURS + "memory/kv_sizing/", UNIT + "memory/kv_sizing/test_"
ALIKE = KV_UNIT + "growth.py::test_all_ranks_grow_alike_or_none_does"
AGAIN = KV_UNIT + "growth.py::test_what_is_larger_afterwards_is_rehearsed_once_more_and_the_cache_shrinks_to_it"
BESIDE_LONG = KV_UNIT + "phases.py::test_a_long_request_and_the_short_ones_beside_it_have_room_at_once"
LEAST = KV_UNIT + "sizing.py::test_all_ranks_have_what_fits_on_the_one_with_the_least"
TAIL = KV_UNIT + "retirement.py::test_in_every_turn_free_and_held_slots_add_up_to_what_the_engine_believes"
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
            "return nullcontext()",
            "return original(buf)",
            OUTPUT_BUFFER + "the_engines_own_buffer_overwrites_a_residual_and_ours_keeps_it",
        ),
        (
            OFFER,
            "return nullcontext()",
            "return original(buf)",
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
            "result = original(self, layer, *args, **kwargs)\n        with best_effort(\"a layer's",
            'give_up_unread_scales(layer)\n        result = original(self, layer)\n        with best_effort("x',
            SCALES + "what_no_forward_reads_takes_no_memory_and_the_answer_is_the_same",
        ),
        (FP4, " if storage.expired()", "", SCALES + "a_scale_whose_memory_is_read_is_not_counted"),
        (FP4, "    if loader is not None:", "    if False:", SCALES + "an_update_ends_as_on_the_stock_server"),
        (
            FP4,
            "_placeholder(scale) if _no_swizzled_scales.get() else original(scale)",
            "original(scale)",
            WEIGHTS + "placeholders_are_not_allocated",
        ),
        (
            FP4,
            "            if self._moe_runner_backend.value in _MARLIN:\n                drop_swizzled_scales(layer)",
            "            pass",
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
            "    engine.own(utils, _REPACK)\n",
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
        (QUERY, "attention_ranks(resolved)\n", "1\n", SAID.format("gathered from four ranks, 4,096 tokens each")),
        (QUERY, "parsed.mem_fraction_static is not None", "False", SAID.format("a given fraction below the weights")),
        (QUERY, "engine_pools.stage_layers(resolved, layers)", "layers", SAID.format("the first of two stages")),
        (QUERY, "stages * (dense_layers", "(dense_layers", SAID.format("the first of two stages")),
        (QUERY, "vars(made).update(given)", "pass", SAID.format("linear attention in FP8")),
        (QUERY, ", 48, integrated=True", ", 48", SAID.format("a GPU that shares its memory")),
        (
            QUERY,
            'resolved["disable_cuda_graph"] or resolved["disable_piecewise_cuda_graph"]',
            "False",
            SAID.format("no graphs of prefills"),
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
            'vars(psutil)["virtual_memory"] = lambda: SimpleNamespace(available=size)',
            "pass",
            SAID.format("a GPU that shares its memory"),
        ),
        (QUERY, 'name.endswith("_blockscale_swizzled")', "False", SAID.format("NVFP4 on TRT-LLM")),
        (QUERY, '["skip_reason"] or skip_reason', '["skip_reason"]', SAID.format("a KV cache of another kind")),
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
        (BUFFER, " and _has_attention_inputs(built.model)", "", SAID.format("BF16 on TRT-LLM")),
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
        ),
        (KV + "hooks.py", "self._counts_before if mapped else self.pools.counts", "self.pools.counts", ALIKE),
        (KV + "hooks.py", "self.pools.unmap_from(counts)\n        self._requests", "self._requests", ALIKE),
        (KV + "hooks.py", "problem = str(error)\n        self._publish", "pass\n        self._publish", ALIKE),
        (KV + "hooks.py", "again = self._pass < sizing.MAX_PASSES", "again = False", AGAIN),
        (KV + "sizing.py", "min(need.fits for need in needs)", "max(need.fits for need in needs)", LEAST),
        (KV + "sizing.py", "if fits > now and needs[0].missed:", "if False:", LEAST),
        (KV + "retirement.py", "(pages[~in_tail] if len(gone) else pages)", "pages", TAIL),
        (KV + "rehearsal.py", "(must or times * taken <= largest)", "True", JUDGED),
        (KV + "rehearsal.py", "if left >= MIN_FREE_BYTES and", "if left >= 0 and", JUDGED),
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
    )
)


def run(folder: Path, *tests: str) -> tuple[str, str]:
    """How these tests of the copy in ``folder`` end: passed, killed or skipped; and what pytest said."""
    environment = dict(os.environ, PYTHONPATH=str(folder / "python"))
    if all(test.startswith(UNIT) for test in tests):
        environment = {name: value for name, value in environment.items() if not name.startswith("SGLANG")}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", "", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if done.returncode not in (0, 1):
        sys.exit(f"pytest could not run {', '.join(tests)}:\n{said}")
    return "killed" if done.returncode else "passed" if re.search(r"\d passed", said) else "skipped", said


def main(words: list[str]) -> None:
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
            whole = (ROOT / each.file).read_text()
            (copy / each.file).write_text(whole.replace(each.old, each.new))
            outcome, _ = run(copy, each.test)
            (copy / each.file).write_text(whole)
            survived += outcome == "passed"
            print("SURVIVED" if outcome == "passed" else outcome, each.file, repr(each.old), each.test, flush=True)
    if survived:
        sys.exit(f"{survived} of {len(chosen)} mutations survived")


if __name__ == "__main__":
    main(sys.argv[1:])
