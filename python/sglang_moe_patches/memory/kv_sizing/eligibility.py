"""Decide which servers kv-sizing leaves alone. The module has a table of the arguments of these servers, and the two
environment variables that a user sets.

A server in the table keeps the KV cache size of the engine's rule. The rule computes the size from
``--mem-fraction-static``, the *fraction*. In the launcher, a hook remembers whether the user gave the fraction. The
hook runs before the engine chooses a fraction.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from sglang_moe_patches.core import engine
from sglang_moe_patches.core.patch import Patcher, Skip, around
from sglang_moe_patches.core.variables import Variable
from sglang_moe_patches.memory.kv_sizing.phases import attention_ranks, speculates

ALWAYS = "always"


def _mode(text: str) -> str:
    if text == "given":
        raise ValueError("the value given is now called always")
    if text not in ("off", "auto", ALWAYS):
        raise ValueError(f"expected off, auto or always, got {text!r}")
    return "" if text == "off" else text


def _margin(text: str) -> int:
    if not text.isdecimal() or int(text) < LEAST_MARGIN:
        raise ValueError(f"expected a whole number of MB, at least {LEAST_MARGIN}, got {text!r}")
    return int(text) * 1_000_000


LEAST_MARGIN = 200
"""Smallest margin that a user may set, in MB. With a smaller margin, a server could run out of memory when a library
allocates one more buffer."""
KV_SIZING = Variable(
    "SGLANG_MOE_PATCHES_KV_SIZING",
    "always: each start measures and grows the KV cache; auto: the same, but not if --mem-fraction-static is given",
    _mode,
    "off",
)
KV_MARGIN = Variable(
    "SGLANG_MOE_PATCHES_KV_MARGIN_MB",
    "MB that stay free beyond the measured memory; if less than half of this is free, KV cache memory is freed",
    _margin,
    "2000",
)
"""Environment variable for the *margin*: the memory that stays free on each GPU. The default follows from measurements
on fourteen servers with H100s or H200s. Each server ran two kinds of load. For each load, the memory that the forward
passes needed was measured. Between the two loads of a server, this memory differed by at most 1,180 MB. There was one
exception: a further measurement found a difference of 2 GB.

To change the default, change these places, too:

- ``docs/changes/kv-sizing.md``: the section *What it does* states the default. A test in
  ``test/unit/memory/kv_sizing/test_eligibility.py`` compares the page with this default.
- README: ``make pages`` writes the number.
- ``benchmark/results/recipes``: for three recipes, ``doctor`` reports the ``--mem-fraction-static`` that gives the
  first KV cache size, before any growth. This fraction may depend on the margin. Run
  ``.venvs/RELEASE/bin/python benchmark whole/recipes --json benchmark/results/recipes/RELEASE.json`` for each release
  that has a file there (five minutes each).

Measured figures in the README, ``docs/benchmarks`` and ``docs/changes`` stay as they are: their margin was 2,000 MB.
"""


REHEARSED_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
"""Speculative algorithms whose memory a rehearsal can measure, by the engine's names."""
SKIP_ALL_GATHER = "SGLANG_SCHEDULER_SKIP_ALL_GATHER"
"""Environment variable of the engine. If it is on, the ranks do not exchange the sizes of their batches. Data-parallel
ranks, which have different requests, then run different batches."""

Applies = Callable[[Mapping[str, Any], Mapping[str, str]], object]
"""Function that returns whether a server belongs to an :class:`UnsizedKind`. It receives the server's resolved
arguments and the server's environment."""


@dataclass(frozen=True)
class UnsizedKind:
    """Kind of server that keeps the KV cache size of the engine's rule.

    :param name: the engine's argument or environment variable that identifies such servers.
    :param reason: clause that says why such a server is not measured.
    :param applies: function that returns whether a server is of this kind. With ``None``, a server is of this kind if
        its argument ``name`` is on.
    :param condition: further condition, in words for the documentation page.
    """

    name: str
    reason: str
    applies: Applies | None = None
    condition: str = ""

    @property
    def attribute(self) -> str:
        """Attribute of the engine's ``ServerArgs`` for the option ``name``: ``enable_lora`` for ``--enable-lora``."""
        return self.name.removeprefix("--").replace("-", "_")

    def includes(self, arguments: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
        """Return whether a server with these arguments and this environment is of this kind."""
        return bool(self.applies(arguments, environ) if self.applies else arguments.get(self.attribute))


def _argument_over(name: str, limit: int) -> Applies:
    return lambda arguments, _: (arguments.get(name) or limit) > limit


def _argument_other_than(name: str, *values: object) -> Applies:
    return lambda arguments, _: arguments.get(name) not in (None, *values)


def _with_speculation(applies: Applies) -> Applies:
    return lambda arguments, environ: speculates(arguments) and applies(arguments, environ)


def _with_attention_ranks(applies: Applies) -> Applies:
    return lambda arguments, environ: attention_ranks(arguments) > 1 and applies(arguments, environ)


def _variable_on(name: str) -> Applies:
    return lambda _, environ: is_on(name, environ)


_NOT_REHEARSED = "the rehearsal does not support this server's forward passes"
_MEMORY_CHANGES = "this server's memory use changes while it serves"
_KEEPS_PROMPTS = "this server copies or registers the KV cache, or keeps the rehearsal's prompts"
_BY_SLOT = "this server keeps data for every slot that the KV cache has before it grows"
_SHARDS = "the KV cache is divided among ranks, has an unsupported layout, or does not exist"
_REGISTERED = "the memory of the KV cache is registered elsewhere, or comes from another allocator"
_APART = "ranks do not receive rank 0's requests, or do not exchange batch information"
_SPECULATION, _ATTENTION = "with speculation", "with data-parallel attention"

# Before you add an argument of a new release, read docs/development/new-argument.md.
UNSIZED: tuple[UnsizedKind, ...] = (
    UnsizedKind("--is-embedding", _NOT_REHEARSED),
    UnsizedKind("--encoder-only", _NOT_REHEARSED),
    UnsizedKind("--language-only", _NOT_REHEARSED),
    UnsizedKind("--dllm-algorithm", _NOT_REHEARSED),
    UnsizedKind("--enable-pdmux", _NOT_REHEARSED),
    UnsizedKind("--enable-hisparse", _NOT_REHEARSED),
    UnsizedKind("--attn-cp-size", _NOT_REHEARSED, _argument_over("attn_cp_size", 1)),
    UnsizedKind("--enable-eplb", _NOT_REHEARSED),
    UnsizedKind(
        "--speculative-algorithm",
        _NOT_REHEARSED,
        lambda arguments, _: (
            str(arguments.get("speculative_algorithm") or "").upper() not in ("", *REHEARSED_ALGORITHMS)
        ),
        f"other than {', '.join(REHEARSED_ALGORITHMS)}",
    ),
    UnsizedKind(
        "--enable-priority-scheduling",
        "more requests may run at once than were rehearsed; set --max-running-requests",
        lambda arguments, _: (
            arguments.get("enable_priority_scheduling")
            and not arguments.get("disable_priority_preemption")
            and arguments.get("max_running_requests") is None
        ),
        "without `--max-running-requests` or `--disable-priority-preemption`",
    ),
    UnsizedKind("--disaggregation-mode", _REGISTERED, _argument_other_than("disaggregation_mode", "null")),
    UnsizedKind("--enable-pd-role-switch", _REGISTERED),
    UnsizedKind("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", _REGISTERED, _variable_on("SGLANG_MOONCAKE_CUSTOM_MEM_POOL"), "on"),
    UnsizedKind("--enable-hierarchical-cache", _KEEPS_PROMPTS),
    UnsizedKind("--enable-lmcache", _KEEPS_PROMPTS),
    UnsizedKind("--enable-flexkv", _KEEPS_PROMPTS),
    UnsizedKind("--radix-cache-backend", _KEEPS_PROMPTS, _argument_other_than("radix_cache_backend", "", "auto")),
    UnsizedKind("--enable-unified-cache-external-linker", _KEEPS_PROMPTS),
    UnsizedKind("--kv-canary", _BY_SLOT, _argument_other_than("kv_canary", "", "none")),
    UnsizedKind("--enable-return-routed-experts", _BY_SLOT),
    UnsizedKind("--enable-return-indexer-topk", _BY_SLOT),
    UnsizedKind("--dcp-size", _SHARDS, _argument_over("dcp_size", 1)),
    UnsizedKind("--enable-kv-cache-sharding", _SHARDS),
    UnsizedKind("--enable-dsa-cache-layer-split", _SHARDS),
    UnsizedKind("--enable-page-major-kv-layout", _SHARDS),
    UnsizedKind("--prefill-only-disable-kv-cache", _SHARDS),
    UnsizedKind(
        "--enable-lora",
        _MEMORY_CHANGES,
        lambda arguments, _: arguments.get("enable_lora") or arguments.get("lora_paths"),
    ),
    UnsizedKind("--enable-memory-saver", _MEMORY_CHANGES),
    UnsizedKind("--cpu-offload-gb", _MEMORY_CHANGES),
    UnsizedKind("--offload-group-size", _MEMORY_CHANGES, _argument_over("offload_group_size", 0)),
    UnsizedKind("--elastic-ep-backend", _MEMORY_CHANGES),
    UnsizedKind("--keep-mm-feature-on-device", _MEMORY_CHANGES),
    UnsizedKind("--enable-unified-memory", _MEMORY_CHANGES),
    UnsizedKind(
        "--speculative-adaptive",
        _MEMORY_CHANGES,
        _with_speculation(lambda arguments, _: arguments.get("speculative_adaptive")),
        _SPECULATION,
    ),
    UnsizedKind(
        "--speculative-skip-dp-mlp-sync",
        "one rank of this server may prefill while another rank decodes, which is not rehearsed",
        _with_speculation(lambda arguments, _: arguments.get("speculative_skip_dp_mlp_sync")),
        _SPECULATION,
    ),
    UnsizedKind(
        "--speculative-ngram-external-corpus-path",
        "the flush after a rehearsal would drop this server's n-gram corpus",
        _with_speculation(lambda arguments, _: arguments.get("speculative_ngram_external_corpus_path")),
        _SPECULATION,
    ),
    UnsizedKind(
        "--pp-size",
        "not all pipeline stages of this server speculate",
        _with_speculation(_argument_over("pp_size", 1)),
        _SPECULATION,
    ),
    UnsizedKind(
        "--moe-a2a-backend",
        "the backend's buffers may hold fewer requests than this server admits",
        _argument_other_than("moe_a2a_backend", "none"),
    ),
    UnsizedKind(
        "--enable-dp-attention-local-control-broadcast",
        _APART,
        _with_attention_ranks(lambda arguments, _: arguments.get("enable_dp_attention_local_control_broadcast")),
        _ATTENTION,
    ),
    UnsizedKind(
        "--moe-dense-tp-size",
        _APART,
        _with_attention_ranks(
            lambda arguments, _: arguments.get("moe_dense_tp_size") and arguments.get("enable_dp_lm_head")
        ),
        f"{_ATTENTION} and `--enable-dp-lm-head`",
    ),
    UnsizedKind(SKIP_ALL_GATHER, _APART, _with_attention_ranks(_variable_on(SKIP_ALL_GATHER)), f"on, {_ATTENTION}"),
    UnsizedKind("--use-ray", "this server's launcher asks for the number of KV tokens before the rehearsal"),
    UnsizedKind("--enable-return-hidden-states", "a request can make the engine capture all CUDA graphs again"),
    UnsizedKind(
        "SGLANG_RUST_SERVER",
        "the rehearsal cannot send requests to this server's scheduler",
        _variable_on("SGLANG_RUST_SERVER"),
        "on",
    ),
)
"""All kinds of servers that are not measured and that can be recognized by arguments and environment. Kinds with the
same reason are neighbours. If a server is of two kinds, it gets the reason of the kind that comes first."""


def arguments_of(server_args: Any) -> dict[str, Any]:
    """Return a server's resolved arguments. The key is the argument's name."""
    return dict(vars(engine.resolve_arguments(server_args)))


def skip_reason(mode: object, arguments: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    """Return the reason why a server keeps the KV cache size of the engine's rule. The text can follow "because".

    :param mode: the value of ``SGLANG_MOE_PATCHES_KV_SIZING``.
    :param arguments: the server's resolved arguments.
    :param environ: the server's environment.
    :returns: ``None`` if mode, arguments and environment give no such reason. The server is then measured if
        :mod:`.pools` supports its KV cache.
    """
    if not mode:
        return f"{KV_SIZING.name} is off; auto turns it on"
    if str(arguments.get("device")) != "cuda":
        return f"--device is {arguments.get('device')}"
    kind = next((kind for kind in UNSIZED if kind.includes(arguments, environ)), None)
    return f"of {kind.name}: {kind.reason}" if kind else None


def kept_fraction_reason(mode: object) -> str:
    """Return the reason why kv-sizing keeps the ``--mem-fraction-static`` that the user gave; empty if kv-sizing does
    not keep it. The text can follow "because".

    :param mode: the value of ``SGLANG_MOE_PATCHES_KV_SIZING``.
    """
    return "" if mode == ALWAYS else f"it was given; {KV_SIZING.name}={ALWAYS} measures all the same"


def is_on(name: str, environ: Mapping[str, str]) -> bool:
    """Return whether a boolean environment variable of the engine is on."""
    return environ.get(name, "").strip().lower() in ("1", "true", "yes", "y", "t", "on")


def skip(server_args: Any) -> Skip | None:
    """Return the reason why this process's server keeps the KV cache size of the engine's rule; see
    :func:`skip_reason`."""
    mode = KV_SIZING.read()
    reason = skip_reason(mode, arguments_of(server_args) if mode else {}, os.environ)
    return Skip(reason, can_be_enabled=not mode) if reason else None


# --- Whether the fraction was given ----------------------------------------------------------------------------------

NOT_GIVEN_MARK = "_moe_patches_fraction_by_rule"
"""Attribute of ``ServerArgs`` that says that the user did not give ``--mem-fraction-static``. The schedulers receive
the attribute and delete it."""


def hook_server_args(module: ModuleType, patcher: Patcher) -> None:
    """Make ``ServerArgs`` remember whether the user gave ``--mem-fraction-static``. Newer releases remember it without
    this hook."""
    server_args = module.ServerArgs
    if not KV_SIZING.read(os.environ) or hasattr(server_args, "resolve_once"):
        return
    patcher.wrap(server_args, "__post_init__", around(_mark))


def _mark(original: Callable[..., None], server_args: Any, *args: Any, **kwargs: Any) -> None:
    by_rule = server_args.mem_fraction_static is None
    original(server_args, *args, **kwargs)
    # Set the mark only for servers that are measured. The scheduler of another server would print the mark among its
    # arguments.
    if by_rule and skip(server_args) is None:
        setattr(server_args, NOT_GIVEN_MARK, True)


def is_given_by_the_user(server_args: Any) -> bool:
    """Return whether the user gave ``--mem-fraction-static``.

    If the engine receives resolved arguments, as from ``Engine(server_args=...)``, the fraction counts as given.
    """
    raw = getattr(server_args, "_raw_input", None)
    if isinstance(raw, dict):
        return raw.get("mem_fraction_static") is not None
    return not getattr(server_args, NOT_GIVEN_MARK, False)
