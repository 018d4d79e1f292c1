"""mori-input-truncation: the MoE kernel behind MoRI sees the rows that can have arrived, and never loses one.

Why
    On AMD, MoRI's expert-parallel dispatch hands the MoE kernel its whole receive buffer, sized for the worst case
    (``SGLANG_MORI_NUM_MAX_DISPATCH_TOKENS_PER_RANK`` times the ranks: 32,768 rows for eight ranks), and AITER chooses
    its kernel by that row count instead of the few hundred rows that hold tokens. The engine's
    ``SGLANG_MORI_MOE_MAX_INPUT_TOKENS`` cuts the input first, but below the number of rows really received it drops
    tokens, and MoRI's combine reads past the end of what is left: wrong answers without a word.

How
    The received count lives on the GPU, and reading it back would stall every layer. What the CPU knows is enough for
    an upper bound: how many rows each data-parallel rank brings into this forward (``dp_attention``, where the engine
    puts it once a forward) and how many this rank has just sent. ``MoriEPMoE.__init__`` is wrapped to take the limit
    over and set the attribute by which the engine cuts to 0, so that its own cut never runs; ``run_moe_core`` is
    wrapped to cut the dispatched tensors before it. Where the bound is provable the cut needs no check. Where it is
    not, the user's limit is applied under an assertion on the device. Neither reads anything back.

    From 0.5.13 on MoRI's layer is ``DeepEPMoE``, with EPv2 ``FusedMoE``, which the former goes through: of that one the
    same two methods are wrapped. The engine's own cut sits elsewhere: up to 0.5.21 AITER's runner reads the limit from
    the environment at every forward, and in that module it now reads 0; from 0.5.22 on the dispatcher chooses the rows
    and AITER's runner cuts to the ``recv_cap`` of the dispatch output, in which ours is put.

    During CUDA/HIP-graph capture the engine announces the padded batch instead of the counts. Every rank replays a
    graph of that size, so the bound made from it is static and holds for each replay.

Upstream
    sgl-project/sglang#22952, the unsafe limit, in releases from 0.5.11. Releases from 0.5.19 have
    ``SGLANG_MORI_RECV_BOUND`` beside the limit, which stays unsafe.

Remove when
    the engine never cuts below a bound that it can prove.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

from sglang_moe_patches import engine
from sglang_moe_patches.patch import Change, Outcome, Patcher, Status

LIMIT_VARIABLE = "SGLANG_MORI_MOE_MAX_INPUT_TOKENS"
BOUND_VARIABLE = "SGLANG_MORI_RECV_BOUND"

_LAYER_MODULE = "sglang.srt.layers.moe.ep_moe.layer"
_RUNNER_MODULE = "sglang.srt.layers.moe.moe_runner.aiter"
_RUNNER_FUNCTION = "_pre_permute_deepep_to_aiter"
_ENGINE_BOUND = "_mori_decode_recv_bound"
_RECV_CAP = "recv_cap"
_ENGINE_LIMIT = "mori_moe_max_input_tokens"
_POLICY = "_moe_patches_mori_policy"
_DISPATCHED = ("hidden_states", "hidden_states_scale", "topk_ids", "topk_weights")

logger = logging.getLogger("sglang.srt.moe_patches.mori")


# --- The variables -------------------------------------------------------------------------------------------------


def check_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse values that the engine would quietly take for something else (it reads a misspelt limit as 0).

    :raises ValueError: the message names the variable and its valid values.
    """
    user_limit(environ)
    bound_requested(environ)


def user_limit(environ: Mapping[str, str] = os.environ) -> int:
    """``SGLANG_MORI_MOE_MAX_INPUT_TOKENS``, in rows; 0 when it is unset or empty: no limit.

    :raises ValueError: not an integer, or negative.
    """
    value = environ.get(LIMIT_VARIABLE, "").strip() or "0"
    if not (value.isascii() and value.isdigit()):
        raise ValueError(f"{LIMIT_VARIABLE}: expected 0 (no limit) or a positive number of rows, got {value!r}")
    return int(value)


def bound_requested(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ``SGLANG_MORI_RECV_BOUND=1`` asks for the provable bound without a limit.

    :raises ValueError: neither 0 nor 1.
    """
    value = environ.get(BOUND_VARIABLE, "").strip() or "0"
    if value not in ("0", "1"):
        raise ValueError(f"{BOUND_VARIABLE}: expected 0 or 1, got {value!r}")
    return value == "1"


# --- The decisions -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How the ranks of one expert-parallel group share the attention; the same for every forward.

    ``ranks`` is the expert-parallel size. ``attn_tp`` (attention tensor parallelism) times ``attn_cp`` (attention
    context parallelism) ranks work on the tokens of one data-parallel rank. ``dp_rank`` is this rank's.
    """

    ranks: int
    attn_tp: int = 1
    attn_cp: int = 1
    dp_rank: int = 0

    @property
    def dp_ranks(self) -> int:
        """Data-parallel ranks; 0 where the sizes do not divide, so that nothing can be said.

        Computed, not asked for: the engine reports a data-parallel size of 1 while some draft models run.
        """
        groups, rest = divmod(self.ranks, self.attn_tp * self.attn_cp)
        return 0 if rest else groups


def rows_per_dp_rank(
    counts: Sequence[int] | None,
    local_rows: int | None,
    global_rows: int | None,
    dp_ranks: int,
    *,
    two_batch_overlap: bool = False,
) -> tuple[int, ...] | None:
    """The most rows that each data-parallel rank brings into this forward, or ``None`` where the CPU does not know.

    :param counts: ``dp_attention``'s ``global_num_tokens``: one padded count for each data-parallel rank, in both of
        the engine's padding modes (``MAX_LEN``: all alike; ``SUM_LEN``: each its own, 0 for an idle rank). It holds
        this rank's count alone where the engine gathers nothing between data-parallel ranks (``--moe-dense-tp-size 1``
        with ``--enable-dp-lm-head``), which says nothing about the others.
    :param local_rows: ``dp_attention``'s local buffer length: this rank's padded rows.
    :param global_rows: ``dp_attention``'s global buffer length.
    :param two_batch_overlap: a sub-batch may be running, for which the engine gives no counts; where each
        data-parallel rank splits its own batch, what the others send is not known.

    Without counts the engine is capturing or warming up a graph, or runs a sub-batch. A graph that all data-parallel
    ranks replay together is the one for the largest count among them, announced as a global length of ``dp_ranks``
    times the local one: no rank brings more. Where each rank picks a graph for its own batch, the global length is
    another one, and the others may replay a larger graph.
    """
    if counts is not None:
        return tuple(counts) if len(counts) == dp_ranks and min(counts, default=-1) >= 0 else None
    if local_rows is None or local_rows < 0:
        return None
    if dp_ranks == 1:
        return (local_rows,)
    if not two_batch_overlap and local_rows > 0 and global_rows == local_rows * dp_ranks:
        return (local_rows,) * dp_ranks
    return None


def max_received_rows(sent: int, counts: Sequence[int] | None, layout: Layout, buffer_rows: int) -> int | None:
    """The most rows that this rank can receive in one MoRI dispatch, or ``None``: not provable.

    :param sent: rows that this rank has sent (known from a shape).
    :param counts: the most rows of each data-parallel rank, from :func:`rows_per_dp_rank`; ``None``: unknown.
    :param buffer_rows: rows of the receive buffer; what it cannot hold cannot arrive.

    MoRI sends a row to a destination rank once, however many of the row's experts live there, so from any source rank
    arrive at most the rows which that rank sends, and in all at most the sum over the ranks of the group, this one
    included. (The vendor's own worst-case buffer is that sum for full ranks.) Padding rows are counted: whether they
    travel depends on how the router marks them.

    What the ranks send, by the layout:

    * *Attention TP.* In front of experts behind a dispatcher the engine scatters a data-parallel rank's ``n`` rows
      over its attention-TP ranks (``ScatterMode.SCATTERED``), after padding ``n`` to a multiple of them: each sends
      ``n / attn_tp``, together ``n``. This is not assumed but seen: this rank's ``sent * attn_tp == n``, and all ranks
      run the same model. If it is not seen (a model that scatters nothing, or an idle rank, 0 of 0), each of them may
      send all of ``n``: ``attn_tp`` times as many.
    * *Context parallelism* may split unevenly, or in prefill only: each rank may send all of ``n``.
    * *More sent than counted*: the counts are not this forward's, and nothing follows from them.
    * *One data-parallel rank* and no counts: every rank holds the same batch and sends all of it or its share of an
      even split, in which shares differ by one row at most: at most ``ranks * (sent + 1)``.
    """
    if layout.dp_ranks == 0 or sent < 0:
        return None
    if counts is None:
        if layout.dp_ranks > 1 or layout.attn_cp > 1:
            return None
        return min(sent if layout.ranks == 1 else layout.ranks * (sent + 1), buffer_rows)
    if len(counts) != layout.dp_ranks or sent > counts[layout.dp_rank]:
        return None
    scattered = (
        layout.attn_cp == 1
        and sent * layout.attn_tp == counts[layout.dp_rank] > 0
        and all(rows % layout.attn_tp == 0 for rows in counts)
    )
    senders = 1 if scattered else layout.attn_tp * layout.attn_cp
    return min(senders * sum(counts), buffer_rows)


def rounded(rows: int) -> int:
    """``rows`` rounded up, by less than 1/16, so that a few sizes serve all batches.

    The step is 1/32 of the next power of two. AITER looks its kernel up by the next power of two (up to 1,024 rows; its
    ``get_padded_M``), which stays the same. The fewer sizes spare the allocator and per-shape caches.
    """
    step = max(1, (1 << max(rows - 1, 0).bit_length()) // 32)
    return -(-rows // step) * step


class Cut(NamedTuple):
    rows: int
    """How many rows of the receive buffer the MoE kernel is given."""
    assert_needed: bool
    """More rows than that may arrive: the device has to check."""
    raised: bool
    """The user's limit was below what can arrive, and is not followed."""


def decide_rows(bound: int | None, limit: int, buffer_rows: int, *, recv_bound: bool = False) -> Cut:
    """Where to cut the receive buffer.

    :param bound: the most rows that can arrive, from :func:`max_received_rows`, or ``None``.
    :param limit: the user's, in rows; 0: none.
    :param buffer_rows: rows of the receive buffer.
    :param recv_bound: cut to the bound even without a limit.
    :returns: never more than ``buffer_rows``, and never less than a provable bound. A limit between the bound and the
        rounded bound is followed. At least one row: kernels are not launched on nothing.
    """
    if not (limit or recv_bound):
        return Cut(buffer_rows, False, False)
    if bound is None:
        rows = min(limit or buffer_rows, buffer_rows)
        return Cut(rows, rows < buffer_rows, False)
    bound = min(max(bound, 1), buffer_rows)
    rows = min(rounded(bound), buffer_rows)
    if limit:
        rows = max(bound, min(rows, limit))
    return Cut(rows, False, 0 < limit < bound)


@functools.lru_cache(maxsize=1024)
def _cut(
    sent: int, counts: tuple[int, ...] | None, layout: Layout, buffer_rows: int, limit: int, recv_bound: bool
) -> tuple[int | None, Cut]:
    # Cached: all layers of a forward, and most forwards, ask the same question.
    bound = max_received_rows(sent, counts, layout, buffer_rows)
    return bound, decide_rows(bound, limit, buffer_rows, recv_bound=recv_bound)


# --- The layer -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Policy:
    """What is decided once, when a layer is built.

    ``unreliable`` says why the counts that the engine announces of other ranks may be wrong on this server, or is
    ``None``; ``stale`` is whether this rank's own may be, too. ``assertions`` is whether a failed assertion on the
    device ends the process. ``raise_only`` is whether the engine's own cut is never made smaller, only larger.
    """

    layout: Layout
    limit: int
    recv_bound: bool
    two_batch_overlap: bool = False
    unreliable: str | None = None
    assertions: bool = True
    stale: bool = False
    raise_only: bool = False


_said: set[str] = set()


def _say_once(key: str, message: str, *arguments: Any) -> None:
    if key not in _said:
        _said.add(key)
        logger.warning(message, *arguments)


def truncate(dispatched: Any, policy: Policy, announced: Any) -> Any:
    """``dispatched``, the engine's dispatch output, cut; the very same object if nothing is to be cut.

    Its tensors are cut, or, where it says itself to how many rows the engine shall cut (``recv_cap``), that is set.

    :param dispatched: a named tuple with ``hidden_states`` [buffer, ...], ``hidden_states_scale`` [buffer, ...] or
        ``None``, ``topk_ids`` and ``topk_weights`` [buffer, top-k], ``num_recv_tokens_per_expert`` (despite its name
        the number of rows received, int32 [1]) and ``origin_topk_ids`` [rows sent, top-k].
    :param announced: the class in which ``dp_attention`` keeps what a forward announces.
    :raises RuntimeError: a CPU tensor has more rows than an unprovable limit; on a GPU the process is ended.
    """
    buffer_rows = dispatched.hidden_states.shape[0]
    counts = None
    if not policy.stale and (policy.unreliable is None or policy.layout.dp_ranks == 1):
        counts = rows_per_dp_rank(
            known_to_the_cpu(getattr(announced, "_global_num_tokens", None)),
            getattr(announced, "_local_dp_buffer_len", None),
            getattr(announced, "_global_dp_buffer_len", None),
            policy.layout.dp_ranks,
            two_batch_overlap=policy.two_batch_overlap,
        )
    bound, cut = _cut(
        dispatched.origin_topk_ids.shape[0], counts, policy.layout, buffer_rows, policy.limit, policy.recv_bound
    )
    if cut.raised:
        _say_once(
            "raised",
            "%s=%d is less than the %d rows that this rank can receive: a forward gets what it needs instead "
            "(here %d rows). Set %s=1 and leave the limit out, or set a limit of at least that.",
            LIMIT_VARIABLE,
            policy.limit,
            bound,
            cut.rows,
            BOUND_VARIABLE,
        )
    if bound is None:
        why = policy.unreliable or "the engine's per-rank token counts do not cover every rank that sends"
        if cut.rows == buffer_rows:
            _say_once("uncut", "How many rows a rank can receive is not known (%s): such input is not cut.", why)
        elif not policy.assertions:
            _say_once(
                "unguarded",
                "%s is not applied where the rows that a rank can receive are not known (%s): this PyTorch leaves "
                "device-side assertions out, so that a lost token would go unnoticed.",
                LIMIT_VARIABLE,
                why,
            )
            return _cut_to(dispatched, buffer_rows)
        else:
            # Said beforehand: on ROCm a failed assertion aborts the process without its message.
            _say_once(
                "asserted",
                "How many rows a rank can receive is not known (%s): %s=%d is applied, and a device-side assertion "
                "ends this process should more arrive. Raise the limit, or unset it, if that happens.",
                why,
                LIMIT_VARIABLE,
                policy.limit,
            )
    rows = max(cut.rows, _engines_cut(dispatched)) if policy.raise_only else cut.rows
    if cut.assert_needed and rows < buffer_rows:
        _assert_received(dispatched.num_recv_tokens_per_expert, rows)
    return _cut_to(dispatched, rows)


def _engines_cut(dispatched: Any) -> int:
    """The rows that the engine's dispatcher would cut to; all of them where it would not cut."""
    return getattr(dispatched, _RECV_CAP, 0) or dispatched.hidden_states.shape[0]


def _cut_to(dispatched: Any, rows: int) -> Any:
    whole = rows >= dispatched.hidden_states.shape[0]
    if _RECV_CAP in dispatched._fields:
        cap = 0 if whole else rows
        return dispatched if getattr(dispatched, _RECV_CAP) == cap else dispatched._replace(**{_RECV_CAP: cap})
    if whole:
        return dispatched
    tensors = {name: getattr(dispatched, name) for name in _DISPATCHED}
    return dispatched._replace(**{name: t[:rows] for name, t in tensors.items() if t is not None})


def known_to_the_cpu(counts: Any) -> Any:
    """``counts``, or none of use where one lives on the device: reading it would stall every layer."""
    return counts if counts is None or all(isinstance(count, int) for count in counts) else ()


def _assert_received(received: Any, rows: int) -> None:
    import torch

    torch._assert_async(
        received <= rows,
        f"MoRI delivered more rows than {LIMIT_VARIABLE} lets the MoE kernel see ({rows}): raise it, or unset it",
    )


def assertions_end_the_process(hip: str | None, macros: str) -> bool:
    """Whether a failed device-side assertion ends the process with this build of PyTorch.

    :param hip: ``torch.version.hip``; ``None`` for CUDA, where it always does.
    :param macros: the text of PyTorch's ``Macros.h`` and ``cmake_macros.h``. ROCm builds used to define the assertion
        away unless asked to keep it; newer ones abort.
    """
    if hip is None:
        return True
    if re.search(r"^#define C10_USE_ROCM_KERNEL_ASSERT\b", macros, re.MULTILINE):
        return True
    on_rocm = re.search(r"USE_ROCM\)\n#define CUDA_KERNEL_ASSERT\(cond\)((?:.*\\\n)*.*)", macros)
    return on_rocm is not None and "abort()" in on_rocm.group(1)


@functools.cache
def _assertions_work() -> bool:
    import torch

    headers = Path(inspect.getfile(torch)).parent / "include"
    texts = [
        path.read_text(errors="replace")
        for path in (
            headers / "torch/headeronly/macros/Macros.h",
            headers / "torch/headeronly/macros/cmake_macros.h",
            headers / "c10/macros/Macros.h",
            headers / "c10/macros/cmake_macros.h",
        )
        if path.is_file()
    ]
    return assertions_end_the_process(torch.version.hip, "\n".join(texts))


def _make_init(original: Callable[..., None], read_policy: Callable[[Any], Policy | None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        policy = read_policy(self)
        if policy is not None and (policy.limit or policy.recv_bound):
            setattr(self, _POLICY, policy)
            if hasattr(self, _ENGINE_LIMIT):
                setattr(self, _ENGINE_LIMIT, 0)

    return __init__


def _make_run_moe_core(original: Callable[..., Any], announced: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def run_moe_core(self: Any, dispatch_output: Any) -> Any:
        policy = getattr(self, _POLICY, None)
        if policy is None:
            return original(self, dispatch_output)
        return original(self, truncate(dispatch_output, policy, announced))

    return run_moe_core


def _make_reading_no_limit(original: Callable[..., int]) -> Callable[..., int]:
    """``get_int_env_var`` as AITER's runner sees it, from which it takes the limit at every forward."""

    @functools.wraps(original)
    def get_int_env_var(name: str, *args: Any, **kwargs: Any) -> int:
        return 0 if name == LIMIT_VARIABLE else original(name, *args, **kwargs)

    return get_int_env_var


def _read_layout(layer: Any) -> Layout:
    from sglang.srt.layers import dp_attention

    if hasattr(dp_attention, "get_attention_tp_size"):
        attn_tp = dp_attention.get_attention_tp_size()
        attn_cp = dp_attention.get_attention_cp_size()
        dp_rank = dp_attention.get_attention_dp_rank()
    else:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        attn_tp, attn_cp, dp_rank = parallel.attn_tp_size, parallel.attn_cp_size, parallel.attn_dp_rank
    return Layout(ranks=layer.moe_ep_size, attn_tp=attn_tp, attn_cp=attn_cp, dp_rank=dp_rank)


def _server_setting(bag: str, name: str) -> Any:
    """A setting of this server; ``None`` where this release has none of that name.

    :param bag: the function of ``runtime_context`` that has it, in releases that keep settings there.
    """
    try:
        from sglang.srt import runtime_context

        settings = getattr(runtime_context, bag)()
    except (ImportError, AttributeError):
        from sglang.srt.server_args import get_global_server_args

        settings = get_global_server_args()
    return getattr(settings, name, None)


def _read_policy(layer: Any) -> Policy | None:
    from sglang.srt.environ import envs
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend, is_tbo_enabled

    backend = get_moe_a2a_backend()
    if not backend.is_mori():
        return None
    # How EPv2 lays out what it received is its own affair: the engine bounds it only where it knows that layout. What
    # is left to mend there is a limit of the user's that is too small.
    epv2 = hasattr(backend, "is_mori_epv2") and backend.is_mori_epv2()
    unreliable = None
    stale = str(_server_setting("get_spec", "speculative_algorithm")).upper() == "DSPARK"
    if _server_setting("get_schedule", "enable_dynamic_chunking"):
        # Its profiling run tells each rank that the others bring nothing, while all of them do.
        unreliable = "--enable-dynamic-chunking"
    elif stale:
        # The engine's own bound does not trust the counts with it: they can be of an earlier forward.
        unreliable = "--speculative-algorithm DSPARK"
    elif envs.SGLANG_SCHEDULER_SKIP_ALL_GATHER.get():
        unreliable = "SGLANG_SCHEDULER_SKIP_ALL_GATHER"
    return Policy(
        layout=_read_layout(layer),
        limit=user_limit(),
        recv_bound=bound_requested() and not epv2,
        two_batch_overlap=is_tbo_enabled(),
        unreliable=unreliable,
        assertions=_assertions_work(),
        stale=stale,
        raise_only=epv2,
    )


# --- The change ------------------------------------------------------------------------------------------------------


def _needed(server_args: Any) -> str | None:
    if server_args.moe_a2a_backend != "mori":
        return f"--moe-a2a-backend is {server_args.moe_a2a_backend}"
    if not (user_limit() or bound_requested()):
        return f"neither {LIMIT_VARIABLE} nor {BOUND_VARIABLE} is set"
    return None


def _layer_class() -> type | None:
    """The MoE layer behind MoRI; from 0.5.13 on, the one that MoRI's own goes through and that EPv2 uses as it is."""
    from sglang.srt.layers.moe.ep_moe import layer

    found: type | None = getattr(layer, "MoriEPMoE", None) or getattr(layer, "FusedMoE", None)
    return found


def _reads_the_limit(runner: Any, function: Callable[..., Any]) -> bool:
    """Whether AITER's runner itself takes the limit from the environment, by a name that can be replaced."""
    reads = engine.calls(function, "get_int_env_var")
    return hasattr(runner, "get_int_env_var") and any(LIMIT_VARIABLE in ast.unparse(call) for call in reads)


def _where_the_engine_cuts(layer: type, dispatched: Any) -> str | None:
    """Why the engine's own cut cannot be taken over, or ``None``."""
    run_moe_core = vars(layer)["run_moe_core"]
    if engine.mentions(run_moe_core, _ENGINE_LIMIT):
        if engine.mentions(vars(layer)["__init__"], _ENGINE_LIMIT):
            return None
        return f"{layer.__name__}.__init__ does not use {_ENGINE_LIMIT}"
    if util.find_spec(_RUNNER_MODULE) is None:
        return f"{layer.__name__}.run_moe_core does not use {_ENGINE_LIMIT}"
    runner = importlib.import_module(_RUNNER_MODULE)
    function = getattr(runner, _RUNNER_FUNCTION, None)
    if function is None:
        return f"{_RUNNER_MODULE} has no {_RUNNER_FUNCTION}"
    if _RECV_CAP in dispatched._fields:
        return None if engine.mentions(function, _RECV_CAP) else f"{_RUNNER_FUNCTION} does not use {_RECV_CAP}"
    return None if _reads_the_limit(runner, function) else f"{_RUNNER_FUNCTION} does not read {LIMIT_VARIABLE}"


def _probe() -> Outcome:
    from sglang.srt import environ
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.moe import utils
    from sglang.srt.layers.moe.token_dispatcher import moriep

    mori = _layer_class()
    if mori is None or not {"__init__", "run_moe_core"} <= set(vars(mori)):
        return Outcome(Status.UNSUPPORTED, f"{_LAYER_MODULE} has no MoE layer for MoRI with its own run_moe_core")
    needed_fields = {*_DISPATCHED, "num_recv_tokens_per_expert", "origin_topk_ids"}
    for reason in (
        None
        if engine.parameters(vars(mori)["run_moe_core"]) == ["self", "dispatch_output"]
        else f"{mori.__name__}.run_moe_core takes more than the dispatch output",
        *(
            None
            if needed_fields <= set(getattr(getattr(moriep, name, None), "_fields", ()))
            else f"{name} does not have the fields {', '.join(sorted(needed_fields))}"
            for name in ("MoriEPNormalDispatchOutput", "MoriEPLLDispatchOutput")
        ),
        *(
            None if hasattr(module, name) else f"{module.__name__} has no {name}"
            for module, name in (
                (dp_attention, "_DpGatheredBufferWrapper"),
                (utils, "is_tbo_enabled"),
                (utils, "get_moe_a2a_backend"),
            )
        ),
        None
        if hasattr(environ.envs, "SGLANG_SCHEDULER_SKIP_ALL_GATHER")
        else "SGLANG_SCHEDULER_SKIP_ALL_GATHER is unknown",
        _where_the_layout_is_unknown(),
    ):
        if reason is not None:
            return Outcome(Status.UNSUPPORTED, reason)
    if reason := _where_the_engine_cuts(mori, moriep.MoriEPNormalDispatchOutput):
        return Outcome(Status.UNSUPPORTED, reason)
    announces = dp_attention._DpGatheredBufferWrapper.set_dp_buffer_len
    expected = ["global_dp_buffer_len", "local_dp_buffer_len", "dp_max_padding", "global_num_tokens"]
    if reason := engine.missing_parameters(announces, expected):
        return Outcome(Status.UNSUPPORTED, reason)
    for name in ("_global_num_tokens", "_local_dp_buffer_len", "_global_dp_buffer_len"):
        if not engine.mentions(announces, name):
            return Outcome(Status.UNSUPPORTED, f"dp_attention's set_dp_buffer_len does not set {name}")
    return Outcome(Status.HARDENED)


def _where_the_layout_is_unknown() -> str | None:
    from sglang.srt.layers import dp_attention

    names = ("get_attention_tp_size", "get_attention_cp_size", "get_attention_dp_rank")
    if all(hasattr(dp_attention, name) for name in names):
        return None
    try:
        from sglang.srt.runtime_context import get_parallel
    except ImportError as error:
        return str(error)
    for name in ("attn_tp_size", "attn_cp_size", "attn_dp_rank"):
        try:
            getattr(get_parallel(), name)
        except AttributeError as error:
            return str(error)
        except Exception:
            pass  # known, and not set yet
    return None


def _install(patcher: Patcher) -> None:
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.moe.token_dispatcher import moriep

    mori = _layer_class()
    assert mori is not None  # the probe has seen to that
    patcher.wrap(mori, "__init__", lambda original: _make_init(original, _read_policy))
    patcher.wrap(
        mori, "run_moe_core", lambda original: _make_run_moe_core(original, dp_attention._DpGatheredBufferWrapper)
    )
    if mori.__name__ == "MoriEPMoE" or _RECV_CAP in moriep.MoriEPNormalDispatchOutput._fields:
        return
    runner = importlib.import_module(_RUNNER_MODULE)
    patcher.wrap(runner, "get_int_env_var", _make_reading_no_limit)
    if hasattr(runner, _ENGINE_BOUND):
        patcher.wrap(runner, _ENGINE_BOUND, lambda original: functools.wraps(original)(lambda *rows: 0))


CHANGE = Change(
    name="mori-input-truncation",
    summary="the MoE input behind MoRI is cut to the rows that can have arrived, never below",
    probe=_probe,
    install=_install,
    needed=_needed,
)
