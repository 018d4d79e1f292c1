"""cutedsl-sizing: CuteDSL buffers that fit every forward, and are allocated once instead of once per layer.

Why
    With ``--moe-runner-backend flashinfer_cutedsl`` every MoE layer owns a FlashInfer ``CuteDslMoEWrapper`` whose
    buffers are sized by a guess (``chunked_prefill_size``, ``cuda_graph_max_bs``). A larger forward ends the server:
    ``ValueError: num_tokens (4073) exceeds max_num_tokens (2048)``. Sized for the worst forward, and paid once per
    layer, they cost 17.2 GB in Kimi-K2.5 at TP=4.

How
    The number of tokens is the largest that the engine's scheduler can bring (:func:`max_forward_tokens`). Layers of
    the same configuration share one wrapper: it holds no weights, and layers run one after another. Its output does
    not go into its own buffer, which the next layer would overwrite, but into the buffer that output-buffer offers, or
    a fresh tensor. A forward that is larger all the same runs in slices. The engine's ``ensure_cutedsl_wrapper`` does
    the work: for its duration, the class it constructs is replaced.

Upstream
    The sizing: sgl-project/sglang#26696, in releases from 0.5.13, which is not the worst case and paid in every layer.
    FlashInfer 0.6.14, which releases from 0.5.16 bring, keeps no buffers and refuses no forward.

Remove when
    0.5.15.post1 is no longer supported.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from sglang_moe_patches import engine
from sglang_moe_patches.changes import output_buffer
from sglang_moe_patches.patch import CUTEDSL_RUNNER, Change, Outcome, Patcher, Status, runner_needed

if TYPE_CHECKING:
    import torch

BUDGET_VARIABLE = "SGLANG_FLASHINFER_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
BUDGET_DEFAULT = 1024
"""Tokens per rank of the all-to-all dispatcher where the variable is unset, as in the engine."""

_METHOD = "cutedsl_moe_max_num_tokens"
_TOKEN_ARGUMENTS = ("x", "x_sf", "token_selected_experts", "token_final_scales", "per_token_scale")

#: Where ``get_is_capture_mode`` is: the first of these modules that the engine has.
_CAPTURE_MODULES = (
    "sglang.srt.model_executor.runner_utils.capture_mode",
    "sglang.srt.model_executor.cuda_graph_runner",
)

logger = logging.getLogger("sglang.srt.moe_patches")


# --- The decisions -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForwardLimits:
    """What bounds the tokens of one forward on one data-parallel rank."""

    max_prefill_tokens: int
    """``--max-prefill-tokens``: a prefill batch takes no further request beyond it; the first one always fits."""
    graph_requests: int = 0
    """``--cuda-graph-max-bs``."""
    piecewise_tokens: int = 0
    """``piecewise_cuda_graph_max_tokens``; 0 where piecewise CUDA graphs are disabled."""
    draft_tokens: int = 1
    """``speculative_num_draft_tokens``, the tokens of one request that a verification brings; 1 without speculation."""
    chunk_tokens: int | None = 0
    """``--chunked-prefill-size``; ``None`` where chunked prefill is off, 0 where the engine has yet to choose it."""
    request_tokens: int = 0
    """The longest request, prompt and output (a retracted request is prefilled again with both); 0 if not known."""
    unchecked_requests: bool = False
    """Requests with ``ignore_eos`` are admitted whatever is left of ``max_prefill_tokens``: the engine does so where
    the radix cache is disabled."""
    requests: int = 0
    """Requests that can run at once on this rank; 0 if not known."""
    other_tokens_per_request: int = 1
    """The most tokens of one request in a draft or draft-extend forward."""
    cache_tokens: int = 0
    """Tokens of the KV cache, which every prefilled token occupies; 0 if not known."""
    padding: int = 1
    """A forward is padded to a multiple of this many tokens (tensor-parallel ranks within a data-parallel one)."""


def max_forward_tokens(limits: ForwardLimits) -> int:
    """The largest number of tokens that one forward can bring on one data-parallel rank.

    Upstream's terms (sgl-project/sglang#26696) are ``max_prefill_tokens``, ``piecewise_tokens`` and ``graph_requests *
    draft_tokens``. Beyond them, from the engine's scheduler (``PrefillAdder``, ``ScheduleBatch``):

    - the first request of a prefill batch is admitted whatever its length: one chunk, or with chunked prefill off the
      whole request. Mixed chunks subtract the running decodes from both budgets first, and so add nothing.
    - with chunked prefill off, further requests must fit into what is left, except those admitted unchecked, the last
      of which may start when one token is left.
    - a decode batch larger than the largest captured one runs eagerly; the autotuner's dummy batch is of that size too.
    - a draft step brings ``topk`` tokens per request, a draft-extend one ``num_steps + 1`` or more.
    """
    upstream = max(limits.max_prefill_tokens, limits.piecewise_tokens, limits.graph_requests * limits.draft_tokens)
    if limits.chunk_tokens is not None:
        prefill = limits.chunk_tokens
    elif limits.unchecked_requests:
        prefill = max(limits.max_prefill_tokens - 1, 0) + limits.request_tokens
    else:
        prefill = limits.request_tokens
    if limits.cache_tokens:
        prefill = min(prefill, limits.cache_tokens)
    running = max(limits.requests, limits.graph_requests)
    decode = running * max(limits.draft_tokens, limits.other_tokens_per_request)
    return _round_up(max(upstream, prefill, decode), limits.padding)


def other_tokens_per_request(topk: int, steps: int, *, multi_layer: bool) -> int:
    """The most tokens of one request in a draft or draft-extend forward of EAGLE-like speculation.

    :param topk: ``speculative_eagle_topk``, the branches that a draft step follows.
    :param steps: ``speculative_num_steps`` (adaptive speculation: the most it may choose).
    :param multi_layer: each step has a layer of its own, and step ``i`` extends by ``steps + 1 + i`` tokens.
    """
    return max(topk, 2 * steps if multi_layer else steps + 1, 1)


def wrapper_tokens(rank_tokens: int, gathered_ranks: int, dispatcher_tokens: int | None, ep_size: int) -> int:
    """Tokens that a wrapper's buffers must hold.

    :param rank_tokens: the largest forward of one data-parallel rank.
    :param gathered_ranks: data-parallel ranks whose tokens the all-gather path puts together before the experts.
    :param dispatcher_tokens: of an all-to-all dispatcher, the tokens that it takes from one rank; ``None`` without one.
    """
    return rank_tokens * gathered_ranks if dispatcher_tokens is None else dispatcher_tokens * ep_size


def budget_error(required: int, budget: int, ep_size: int) -> str | None:
    """Why the all-to-all dispatcher cannot take the largest forward, with the line that mends it; else ``None``.

    :param required: tokens of the largest forward of one rank.
    :param budget: ``SGLANG_FLASHINFER_NUM_MAX_DISPATCH_TOKENS_PER_RANK``.
    """
    if budget * ep_size >= required:
        return None
    return (
        f"{BUDGET_VARIABLE}={budget} times ep_size={ep_size} is a budget of {budget * ep_size} tokens, and one forward "
        f"can bring {required}. Set it before the start:\n"
        f"export {BUDGET_VARIABLE}={-(-required // ep_size)}\n"
        "or lower --max-prefill-tokens, --cuda-graph-max-bs or --max-running-requests."
    )


def may_share(*, two_batch_overlap: bool, prefill_decode_multiplexing: bool) -> bool:
    """Whether layers may share one wrapper: they must run one after another on the device.

    The dual-stream path qualifies (each layer's streams join before the next layer starts), a draft model too (it runs
    on the target's stream). Two-batch overlap interleaves two batches, and multiplexing runs prefill and decode on
    streams of their own.
    """
    return not (two_batch_overlap or prefill_decode_multiplexing)


def slices(tokens: int, size: int) -> list[slice]:
    """The fewest slices of at most ``size`` rows that cover ``tokens`` rows; one empty slice for no rows."""
    return [slice(start, min(start + size, tokens)) for start in range(0, max(tokens, 1), size)]


def _round_up(tokens: int, multiple: int) -> int:
    return tokens + -tokens % multiple


# --- The wrapper -----------------------------------------------------------------------------------------------------


class SharedMoE:
    """Stands in for a layer's ``CuteDslMoEWrapper``; where layers may share, all of a configuration hold the same one.

    :param wrapper: FlashInfer's, with its buffers for CUDA graphs.
    :param ranks: data-parallel ranks whose tokens come together in one run; for the message alone.
    :param is_capturing: whether the engine captures CUDA graphs now, the warm-up runs before each capture included.
    """

    def __init__(self, wrapper: Any, ranks: int, is_capturing: Callable[[], bool]) -> None:
        self._wrapper = wrapper
        self._ranks = ranks
        self._is_capturing = is_capturing
        self._warned = False
        # The output goes into the caller's memory: four fifths of the buffers are never needed.
        wrapper._moe_output = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapper, name)

    def run(self, **arguments: Any) -> torch.Tensor:
        """FlashInfer's ``run``, with keyword arguments as the engine passes them.

        :returns: [tokens, hidden], in the offered output buffer or a tensor of its own.
        :raises ValueError: more tokens than the buffers hold while CUDA graphs are captured.
        """
        wrapper = self._wrapper
        ids = arguments["token_selected_experts"]
        tokens = ids.shape[0]
        output = _output((tokens, wrapper.hidden_size), wrapper.output_dtype, ids.device)
        if tokens <= wrapper.max_num_tokens:
            return self._run_into(output, arguments)
        self._tell(tokens)
        by_token = {name: arguments[name] for name in _TOKEN_ARGUMENTS if arguments.get(name) is not None}
        for rows in slices(tokens, wrapper.max_num_tokens):
            self._run_into(output[rows], {**arguments, **{name: value[rows] for name, value in by_token.items()}})
        return output

    def _run_into(self, output: torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor:
        # `run` has no parameter for its output; with buffers, it takes the first rows of this attribute.
        self._wrapper._moe_output = output
        try:
            self._wrapper.run(**arguments)
        finally:
            self._wrapper._moe_output = None
        return output

    def _tell(self, tokens: int) -> None:
        size = self._wrapper.max_num_tokens
        flag = f"--max-prefill-tokens {-(-tokens // self._ranks)}"
        if self._is_capturing():
            raise ValueError(
                f"CuteDSL: a CUDA graph of {tokens} tokens does not fit buffers for {size}; raise {flag} or lower "
                "--cuda-graph-max-bs"
            )
        if not self._warned:
            self._warned = True
            logger.warning(
                f"CuteDSL: a forward brought {tokens} tokens, and the buffers hold {size}: it runs in slices, slower "
                f"but with the same result. Start with {flag} to avoid that."
            )


def _output(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    import torch

    buffer = None if torch.compiler.is_compiling() else output_buffer.take(shape, dtype, device)
    return torch.empty(shape, dtype=dtype, device=device) if buffer is None else buffer


_shared: WeakValueDictionary[tuple, SharedMoE] = WeakValueDictionary()


def _make_ensure(original: Callable[[Any], None], flashinfer: Any, is_capturing: Callable[[], bool]) -> Any:
    @functools.wraps(original)
    def ensure_cutedsl_wrapper(layer: Any) -> None:
        if getattr(layer, "_cutedsl_wrapper", None) is not None:
            return
        real = flashinfer.CuteDslMoEWrapper
        flashinfer.CuteDslMoEWrapper = functools.partial(_construct, real, layer, is_capturing)
        try:
            original(layer)
        finally:
            flashinfer.CuteDslMoEWrapper = real

    return ensure_cutedsl_wrapper


def _construct(real: Any, layer: Any, is_capturing: Callable[[], bool], **arguments: Any) -> Any:
    from sglang.srt.server_args import get_global_server_args

    server_args = get_global_server_args()
    dispatcher = getattr(layer, "dispatcher", None)
    # Without data-parallel attention, data-parallel replicas never see each other's tokens.
    ranks = server_args.dp_size if server_args.enable_dp_attention else 1
    arguments["max_num_tokens"] = wrapper_tokens(
        max_forward_tokens(_limits_of(server_args, _seen)),
        ranks,
        getattr(dispatcher, "max_num_tokens", None),
        getattr(dispatcher, "ep_size", 1),
    )
    key = tuple(sorted(arguments.items()))
    may = _shares(server_args)
    if may and key in _shared:
        return _shared[key]
    wrapper = real(**arguments)
    if not wrapper.use_cuda_graph:
        return wrapper  # FlashInfer holds no buffers then, and has no limit
    shared = SharedMoE(wrapper, ranks, is_capturing)
    if may:
        logger.info(f"CuteDSL: one set of buffers, for {wrapper.max_num_tokens} tokens, serves all layers")
        _shared[key] = shared
    return shared


def _shares(server_args: Any) -> bool:
    return may_share(
        two_batch_overlap=bool(server_args.enable_two_batch_overlap),
        prefill_decode_multiplexing=bool(getattr(server_args, "enable_pdmux", False)),
    )


# --- What the configuration, and later the scheduler's pools, say -----------------------------------------------------


@dataclass
class Pools:
    """What a process's model runners decided at start-up; 0 before they did."""

    requests: int = 0
    cache_tokens: int = 0
    request_tokens: int = 0


_seen = Pools()


def _limits_of(server_args: Any, pools: Pools) -> ForwardLimits:
    speculative = bool(server_args.speculative_algorithm)
    chunk = server_args.chunked_prefill_size
    chunked = chunk is None or chunk > 0
    graph_requests, piecewise_tokens = _graph_limits(server_args)
    ranks = server_args.dp_size if server_args.enable_dp_attention else 1
    return ForwardLimits(
        max_prefill_tokens=server_args.max_prefill_tokens,
        graph_requests=graph_requests,
        piecewise_tokens=piecewise_tokens,
        draft_tokens=(server_args.speculative_num_draft_tokens or 1) if speculative else 1,
        chunk_tokens=(chunk or 0) if chunked else None,
        request_tokens=0 if chunked else pools.request_tokens or server_args.get_model_config().context_len,
        unchecked_requests=bool(server_args.disable_radix_cache),
        requests=pools.requests or (server_args.max_running_requests or 0) // ranks,
        other_tokens_per_request=_other_tokens_per_request(server_args) if speculative else 1,
        cache_tokens=pools.cache_tokens,
        padding=_padding(server_args),
    )


def _graph_limits(server_args: Any) -> tuple[int, int]:
    """The most requests of a captured decode, and the most tokens of a captured prefill."""
    config = getattr(server_args, "cuda_graph_config", None)
    if config is not None:  # releases from 0.5.14
        # The engine's own number leaves out prefill graphs other than piecewise ones. They are captured all the same.
        captured = config.prefill.backend != "disabled"
        return config.decode.max_bs or 0, (config.prefill.max_bs or 0) if captured else 0
    piecewise = 0 if server_args.disable_piecewise_cuda_graph else server_args.piecewise_cuda_graph_max_tokens
    return server_args.cuda_graph_max_bs or 0, piecewise or 0


def _adaptive_steps(initial: int, path: str | None) -> int:
    from sglang.srt.speculative import adaptive_spec_params as adaptive

    if hasattr(adaptive, "resolve_candidate_steps_from_config"):  # releases from 0.5.13
        return max(adaptive.resolve_candidate_steps_from_config(path))
    return adaptive.AdaptiveSpeculativeParams(initial, adaptive.load_adaptive_config(path)).max_steps


def _other_tokens_per_request(server_args: Any) -> int:
    steps = server_args.speculative_num_steps or 0
    if server_args.speculative_adaptive:
        steps = max(steps, _adaptive_steps(steps, server_args.speculative_adaptive_config))
    return other_tokens_per_request(
        server_args.speculative_eagle_topk or 1, steps, multi_layer=bool(server_args.enable_multi_layer_eagle)
    )


def _padding(server_args: Any) -> int:
    if server_args.enable_dp_attention:
        return server_args.tp_size // server_args.dp_size
    scattered = server_args.moe_dense_tp_size == 1 or server_args.enable_attn_tp_input_scattered
    return server_args.tp_size if scattered or server_args.moe_a2a_backend != "none" else 1


def _cutedsl_moe_max_num_tokens(self: Any) -> int:
    """The largest number of tokens that one forward can bring on one data-parallel rank, from the configuration alone.

    Where the engine has yet to choose (``max_running_requests`` unset), the terms that depend on it are left out; the
    buffers are sized when it has.
    """
    return max_forward_tokens(_limits_of(self, Pools()))


def check_budget(server_args: Any, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse an all-to-all budget that the largest forward does not fit into.

    :raises ValueError: with the ``export`` line that mends it.
    """
    if (
        server_args.moe_runner_backend != CUTEDSL_RUNNER
        or server_args.moe_a2a_backend != "flashinfer"
        or server_args.disaggregation_mode == "decode"
    ):
        return
    budget = int(environ.get(BUDGET_VARIABLE) or BUDGET_DEFAULT)
    if error := budget_error(server_args.cutedsl_moe_max_num_tokens(), budget, server_args.ep_size):
        raise ValueError(error)


def extend_server_args(server_args_class: Any, patcher: Patcher) -> None:
    """Give ``ServerArgs`` the method and the start-up check, unless the engine has them.

    Where it has, both keep the engine's own number: other things are sized by it, and a dispatcher's budget that the
    engine accepts is not refused here. The wrapper's buffers are sized by ours.

    Called in every process, the launcher's too: there ``check_server_args`` runs when all arguments are resolved.
    """
    if hasattr(server_args_class, _METHOD) or _sized_by_the_engine(server_args_class):
        return
    patcher.add(server_args_class, _METHOD, _cutedsl_moe_max_num_tokens)

    def make_check(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def check_server_args(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            check_budget(self)

        return check_server_args

    patcher.wrap(server_args_class, "check_server_args", make_check)


def _sized_by_the_engine(server_args_class: Any) -> bool:
    # Later releases moved the method into a module of their own, which earlier ones do not have.
    own = vars(server_args_class).get(_METHOD)
    return own not in (None, _cutedsl_moe_max_num_tokens) or engine.has_module("sglang.srt.runtime_context")


def hook_server_args(module: Any) -> None:
    """Extend ``ServerArgs`` for the life of the process, as soon as the engine has imported it."""
    extend_server_args(module.ServerArgs, Patcher())


def _make_init_memory_pool(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init_memory_pool(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _seen.requests = max(_seen.requests, self.req_to_token_pool.size)
        if not getattr(self.server_args, "prefill_only_disable_kv_cache", False):
            _seen.cache_tokens = max(_seen.cache_tokens, self.max_total_num_tokens)
        _seen.request_tokens = max(_seen.request_tokens, self.model_config.context_len)

    return init_memory_pool


def _make_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply(self: Any, layer: Any, dispatch_output: Any, *args: Any, **kwargs: Any) -> Any:
        # The shared experts still read the MoE input after the routed ones have written their output.
        output_buffer.withdraw_if_shared(dispatch_output.hidden_states)
        return original(self, layer, dispatch_output, *args, **kwargs)

    return apply


# --- The change ------------------------------------------------------------------------------------------------------


_ARGUMENTS = (
    "max_prefill_tokens",
    "chunked_prefill_size",
    "disable_radix_cache",
    "max_running_requests",
    "speculative_algorithm",
    "speculative_num_draft_tokens",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_adaptive",
    "speculative_adaptive_config",
    "enable_multi_layer_eagle",
    "enable_dp_attention",
    "enable_two_batch_overlap",
    "enable_attn_tp_input_scattered",
    "moe_dense_tp_size",
    "moe_a2a_backend",
)
_GRAPH_ARGUMENTS = ("cuda_graph_max_bs", "disable_piecewise_cuda_graph", "piecewise_cuda_graph_max_tokens")


def keeps_buffers(wrapper_class: Any) -> bool:
    """Whether FlashInfer's wrapper holds buffers for a number of tokens, and refuses a forward of more."""
    return any(engine.mentions(wrapper_class.run, name) for name in ("_moe_output", "max_num_tokens"))


def _probe() -> Outcome:
    from sglang.srt.layers.quantization import modelopt_quant
    from sglang.srt.server_args import ServerArgs

    try:
        from flashinfer import CuteDslMoEWrapper
    except ImportError:
        return Outcome(Status.NOT_NEEDED, "this FlashInfer has no CuteDslMoEWrapper (no CuTe DSL installed)")
    if not keeps_buffers(CuteDslMoEWrapper):
        return Outcome(Status.NATIVE, "this FlashInfer's wrapper keeps no buffers and refuses no forward")
    from sglang.srt.layers.moe.moe_runner import flashinfer_cutedsl
    from sglang.srt.model_executor.model_runner import ModelRunner

    ensure = flashinfer_cutedsl.ensure_cutedsl_wrapper
    constructions = engine.calls(ensure, "CuteDslMoEWrapper")
    keywords = {k.arg for call in constructions for k in call.keywords}
    fields = getattr(ServerArgs, "__dataclass_fields__", {})
    for reason in (
        engine.missing_parameters(ensure, ["layer"]),
        None
        if len(constructions) == 1 and {"use_cuda_graph", "max_num_tokens"} <= keywords
        else "ensure_cutedsl_wrapper does not construct one CuteDslMoEWrapper with use_cuda_graph and max_num_tokens",
        None
        if engine.mentions(ensure, "_cutedsl_wrapper")
        else "ensure_cutedsl_wrapper does not keep the wrapper as _cutedsl_wrapper",
        engine.missing_parameters(
            modelopt_quant.ModelOptNvFp4FusedMoEMethod.apply, ["self", "layer", "dispatch_output"]
        ),
        None if hasattr(ModelRunner, "init_memory_pool") else "ModelRunner has no init_memory_pool",
        None if any(map(engine.has_module, _CAPTURE_MODULES)) else "the engine has no get_is_capture_mode",
        None if hasattr(ServerArgs, "check_server_args") else "ServerArgs has no check_server_args",
        *(
            None if name in fields else f"ServerArgs has no {name}"
            for name in (*_ARGUMENTS, *(() if "cuda_graph_config" in fields else _GRAPH_ARGUMENTS))
        ),
        None
        if engine.mentions(CuteDslMoEWrapper.run, "_moe_output")
        else "CuteDslMoEWrapper.run does not write into its _moe_output",
    ):
        if reason is not None:
            return Outcome(Status.UNSUPPORTED, reason)
    if _sized_by_the_engine(ServerArgs):
        return Outcome(
            Status.HARDENED, "the engine's own number of tokens is not the worst case, and is paid per layer"
        )
    return Outcome(Status.APPLIED)


def _install(patcher: Patcher) -> None:
    import flashinfer
    from sglang.srt.layers.moe.moe_runner import flashinfer_cutedsl
    from sglang.srt.layers.quantization import modelopt_quant
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

    capture = importlib.import_module(next(name for name in _CAPTURE_MODULES if engine.has_module(name)))
    extend_server_args(ServerArgs, patcher)
    patcher.wrap(
        flashinfer_cutedsl,
        "ensure_cutedsl_wrapper",
        lambda original: _make_ensure(original, flashinfer, lambda: capture.get_is_capture_mode()),
    )
    patcher.wrap(modelopt_quant.ModelOptNvFp4FusedMoEMethod, "apply", _make_apply)
    owner = next(c for c in ModelRunner.__mro__ if "init_memory_pool" in vars(c))
    patcher.wrap(owner, "init_memory_pool", _make_init_memory_pool)


CHANGE = Change(
    name="cutedsl-sizing",
    summary="CuteDSL buffers that fit every forward, allocated once for all layers",
    probe=_probe,
    install=_install,
    needed=runner_needed(CUTEDSL_RUNNER),
)
