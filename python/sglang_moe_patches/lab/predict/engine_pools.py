"""Size of the KV cache that the engine would make for a model, computed by the engine's own code.

The module runs in an engine query (:mod:`.engine_query`): a process without a GPU, with only the first layers of the
model. The module makes a ``ModelRunner`` without calling its constructor, and sets the attributes that the engine reads
to compute the KV cache size. No KV cache is allocated. The module only finds out the class names of the KV cache and of
the request table.
"""

from __future__ import annotations

import ast
import math
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_moe_patches.core import engine
from sglang_moe_patches.memory.kv_sizing import eligibility, engine_rule
from sglang_moe_patches.memory.kv_sizing.pools import GIB, unknown_pool_reason

FRACTION_STEP = 0.01
"""Predicted values of ``--mem-fraction-static`` are rounded to a multiple of this step. A smaller step would not make
the values more exact, because the memory that CUDA and NCCL use is not known exactly."""
HELD_BYTES = 1_200_000_000
"""Bytes of a GPU that CUDA and the engine's libraries use before the engine makes its KV cache. The value was measured
on an H100 with one rank. On H200s, up to 2,800 MB were measured. ``MEASURED`` in
``test/engine/lab/test_doctor_cases.py`` has the measurements."""


@dataclass(frozen=True)
class Fit:
    """Memory of one GPU of a server, in bytes, and the weights and the KV cache that fit into the GPU.

    :param memory: memory of the GPU, without :data:`HELD_BYTES`.
    :param weights: bytes of the weights on this rank.
    :param beside: name of a part of the model that ``weights`` does not count, such as "a draft model"; empty if
        ``weights`` counts all parts.
    :param loading: bytes that stay in use after loading, in addition to the weights.
    :param layout: additional bytes, at their peak, while the engine changes the layout of one layer's experts.
    :param fraction: value of ``--mem-fraction-static``, chosen by the user or by the engine.
    :param given: whether the user chose ``fraction``.
    :param refusal: reason why the engine makes no KV cache, in the engine's own words; empty if it makes a KV cache.
    :param tokens: tokens of the KV cache; ``None`` if not known.
    :param unknown: reason why ``tokens`` is not known.
    :param token_bytes: bytes that the engine allocates for each token of the KV cache; ``None`` if not known.
    :param context: tokens of the longest request that the engine accepts.
    :param begins_with: fraction for kv-sizing's first KV cache. It is larger than ``fraction``, and is set only
        if ``fraction`` makes the KV cache too small for a rehearsal. ``None`` if kv-sizing begins with ``fraction``.
    :param images: bytes that the engine's rule for the KV cache size reserves for images.
    :param limited: whether ``--max-total-tokens`` bounds the KV cache.
    """

    memory: int
    weights: int
    fraction: float
    given: bool
    beside: str = ""
    loading: int = 0
    layout: int = 0
    refusal: str = ""
    tokens: int | None = None
    token_bytes: float | None = None
    unknown: str = ""
    context: int = 0
    begins_with: float | None = None
    images: int = 0
    limited: bool = False

    @property
    def loaded(self) -> int:
        """Bytes in use after the weights have been loaded."""
        return self.weights + self.loading

    @property
    def least_memory(self) -> int:
        """Smallest number of free bytes with which the weights can be loaded."""
        return self.loaded + self.layout

    @property
    def loads(self) -> bool:
        """Whether there is enough memory to load the model. ``--mem-fraction-static`` has no effect on loading."""
        return self.least_memory <= self.memory

    @property
    def starts(self) -> bool:
        """Whether the server starts: the model must load, and ``fraction`` must be large enough for the weights and a
        KV cache. If kv-sizing begins with a larger fraction (``begins_with``), that fraction is large enough."""
        has_cache = not (self.refusal or self.memory * self.fraction <= self.loaded)
        return self.loads and (self.begins_with is not None or has_cache)

    @property
    def least_fraction(self) -> float | None:
        """Smallest ``--mem-fraction-static`` that is large enough for the weights; ``None`` if the model does not load,
        or if no value is large enough."""
        if not self.loads:
            return None
        least = math.ceil(self.loaded / self.memory / FRACTION_STEP) * FRACTION_STEP
        return round(least, 2) if least < 1 else None


def describe_error(error: BaseException) -> str:
    """Format an error as one line. If the error has no message, the line has the failed assertion, or the place that
    raised the error."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    words = " ".join(str(error).split())
    if not words and isinstance(error, AssertionError):
        nodes = ast.walk(ast.parse(Path(place.filename).read_text(encoding="utf-8")))
        lines = {node.lineno: node for node in nodes if isinstance(node, ast.Assert)}
        before = [line for line in lines if line <= (place.lineno or 0)]
        words = ast.unparse(lines[max(before)]) if before else ""
    return f"{type(error).__name__}: {words or f'in {place.name}, {Path(place.filename).name}:{place.lineno}'}"


def describe(fit: Fit) -> dict[str, Any]:
    """Return the fields and the main properties of a :class:`Fit`, as a dictionary for JSON."""
    derived = {name: getattr(fit, name) for name in ("starts", "loads", "least_memory", "least_fraction")}
    return asdict(fit) | derived


def ask(runner: Any, fit: Fit, *, sizes: bool) -> tuple[Fit, str]:
    """Compute the KV cache size that the engine would choose. Also look for a reason why kv-sizing would keep this
    size.

    :param runner: model runner, as :func:`make_runner` makes it.
    :param fit: memory figures of the server, without the figures of the KV cache.
    :param sizes: whether the server's arguments let kv-sizing size the KV cache.
    :returns: ``fit`` with the figures of the KV cache, and the reason why kv-sizing would keep the engine's size. The
        reason is empty if this function finds none. A running server may still find one.
    """
    try:
        maker = runner if hasattr(runner, "_init_pools") else _configurator(runner)
        launch = engine_rule.measure_launch_memory(
            maker, eligibility.arguments_of(runner.server_args), fit.memory / GIB
        )
        fit = replace(fit, token_bytes=engine_rule.bytes_per_token(maker), images=launch.images)
        try:
            config = _resolve_pools(maker, fit, fit.memory - fit.loaded)
            fit = replace(fit, tokens=int(config.max_total_num_tokens))
        except (RuntimeError, ValueError) as error:
            fit = replace(fit, refusal=" ".join(str(error).split()))
            config = _resolve_pools(maker, fit, fit.memory)
        skip_reason = launch.failure or unknown_pool_reason(*_pool_classes(maker, config))
    except Exception as error:
        return replace(fit, unknown=describe_error(error)), ""
    if sizes and not skip_reason and not fit.given:
        launches = [replace(launch, free=fit.memory - fit.loaded)]
        fit = replace(
            fit, begins_with=engine_rule.find_rehearsal_fraction(maker, launches, eligibility.KV_MARGIN.read())
        )
    return fit, skip_reason


def _resolve_pools(maker: Any, fit: Fit, free: int) -> Any:
    """Return the engine's decision on the KV cache size, if ``free`` bytes are free.

    :raises RuntimeError: ``--mem-fraction-static`` leaves no memory for a KV cache. Newer releases raise
        ``ValueError``.
    """
    _set_free_memory(free, fit.memory)
    return maker._resolve_memory_pool_config(fit.memory / GIB)


def stage_bounds(pp_size: int, layers: int) -> list[tuple[int, int]]:
    """Return two layer numbers for each pipeline stage: its first layer, and the layer after its last one. The engine
    divides the layers in the same way."""
    if pp_size == 1:
        return [(0, layers)]
    from sglang.srt.distributed.utils import get_pp_indices

    bounds = [get_pp_indices(layers, stage, pp_size) for stage in range(pp_size)]
    return [(int(start), int(end)) for start, end in bounds]


def make_runner(server_args: Any, resolved: Any, config: Any, model: Any, stage: int = 0) -> Any:
    """Make a ``ModelRunner`` without calling its constructor, and set the attributes that the engine reads to compute
    the KV cache size.

    :param resolved: the server's resolved arguments.
    :param config: the engine's ``ModelConfig``, with all layers.
    :param model: the model, with the few layers that the engine has built.
    :param stage: index of the pipeline stage that the runner serves.
    """
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.model_executor import model_runner
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    runner = object.__new__(model_runner.ModelRunner)
    ranks = resolved.dp_size if resolved.enable_dp_attention else 1
    group = SimpleNamespace(world_size=resolved.pp_size, rank_in_group=stage)
    facts = {
        **{"server_args": server_args, "model_config": config, "model": model, "dtype": config.dtype},
        **{"device": "cuda", "gpu_id": 0, "forward_stream": None, "is_draft_worker": False, "draft_model_idx": None},
        **{"mem_fraction_static": resolved.mem_fraction_static, "page_size": resolved.page_size},
        **{"dp_size": ranks, "tp_size": resolved.tp_size, "pp_size": resolved.pp_size, "pp_group": group},
        "ps": SimpleNamespace(tp_size=resolved.tp_size, pp_size=resolved.pp_size, attn_dp_size=ranks, pp_rank=stage),
        "spec_algorithm": SpeculativeAlgorithm.from_string(resolved.speculative_algorithm),
        "draft_attention_backend": None,
        **dict.fromkeys(("req_to_token_pool", "token_to_kv_pool_allocator", "memory_pool_config")),
        "use_mla_backend": config.attention_arch == AttentionArch.MLA,
        **{"is_hybrid_swa": config.is_hybrid_swa, "is_multimodal": config.is_multimodal},
        "is_hybrid_swa_compress": getattr(config, "is_hybrid_swa_compress", False),
        "sliding_window_size": getattr(config, "sliding_window_size", None),
        "enable_hisparse": resolved.enable_hisparse,
    }
    if hasattr(model_runner, "_UNSET"):  # in 0.5.13, a runner computes this value at its first use
        facts["_linear_attn_registry_cache"] = model_runner._UNSET
    for name, value in facts.items():
        vars(runner)[name] = value
    _set_layers(runner, model_runner, stage)
    runner.configure_kv_cache_dtype()
    return runner


def _set_layers(runner: Any, module: Any, stage: int) -> None:
    """Set the layers that a model runner serves: the layers of one pipeline stage. The model runner cannot find them
    itself, because the model is not complete."""
    config = runner.model_config
    start, end = stage_bounds(runner.pp_size, max(config.num_hidden_layers, config.num_attention_layers))[stage]
    if resolve := getattr(module, "resolve_layer_indices", None):
        built = SimpleNamespace(start_layer=start, end_layer=end)
        asked = {"model": built, "model_config": config, "is_draft_worker": False}
        if "spec_algorithm" in engine.list_parameters(resolve):  # only some releases have this attribute
            asked["spec_algorithm"] = runner.spec_algorithm
        vars(runner)["layer_info"] = resolve(**asked)
        return
    loops = getattr(config.hf_config, "loop_num", 1)
    vars(runner).update(start_layer=start, end_layer=end, num_effective_layers=(end - start) * max(1, loops))


def _configurator(runner: Any) -> Any:
    """Return the engine's object that decides on the KV cache size. Releases from 0.5.16 on have this object."""
    runner.init_spec_aux_hidden_state()
    runner.init_kv_cache_configurator()
    return runner.kv_cache_configurator


def _set_free_memory(free: int, memory: int) -> None:
    """Make PyTorch and psutil report ``free`` bytes of free memory. For an integrated GPU, the engine reads this number
    from psutil. For any other GPU, it reads the number from PyTorch."""
    import psutil
    import torch

    torch.cuda.mem_get_info = lambda *args, **kwargs: (free, memory)
    vars(psutil)["virtual_memory"] = lambda: SimpleNamespace(available=free)


class _RequestTable:
    """Stand-in for the engine's request table, which has one row for each request. When the engine makes a KV pool, the
    pool reads the number of rows. All other methods of the table do nothing."""

    def __init__(self, requests: int) -> None:
        self.req_to_token = SimpleNamespace(shape=(requests, 1))

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class _PoolChosen(Exception):
    """Raised when the engine would make its first KV pool. The argument is the name of the pool's class."""


def _pool_classes(maker: Any, config: Any) -> tuple[str, str]:
    """Return the class names of a server's KV cache and of its request table."""
    from sglang.srt.mem_cache import memory_pool

    tables: list[str] = []

    def name_pool(cls: Any, *args: Any, **kwargs: Any) -> Any:
        raise _PoolChosen(cls.__name__)

    def name_table(cls: Any, *args: Any, **kwargs: Any) -> Any:
        tables.append(cls.__name__)
        # The returned object is not an instance of `cls`, so Python does not call the constructor.
        return _RequestTable(int(config.max_running_requests))

    kinds = {memory_pool.KVCache: name_pool, memory_pool.ReqToTokenPool: name_table}
    for kind, name in kinds.items():
        kind.__new__ = name
    try:
        if hasattr(maker, "_apply_memory_pool_config"):
            maker._apply_memory_pool_config(config)
        else:
            sizes = maker._derive_pool_sizes(config=config)
            maker._init_pools(sizes=sizes, req_to_token_pool=None, token_to_kv_pool_allocator=None)
    except _PoolChosen as made:
        return str(made), tables[0] if tables else ""
    finally:
        for kind in kinds:
            kind.__new__ = object.__new__
    raise engine.Unsupported("the engine makes no KV pool")
