"""Run one rank's MoE layer with the engine's Triton runner or its Marlin kernel, stock and in column slices.

This needs no server and no checkpoint: weights are random, with a model's layer sizes. The benchmark ``moe_workspace``
drives both runners through the same classes.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang_moe_patches.changes.moe_workspace import column_slices, deferred_tensor, marlin, triton
from sglang_moe_patches.changes.moe_workspace.kernels import moe_sum, sum_and_copy
from sglang_moe_patches.core import engine
from sglang_moe_patches.core.dead_input import channel
from sglang_moe_patches.core.patch import Patcher, Plan

from common.shapes import MODELS, Layout, Rank, fuse

LAYOUTS = {"tp1": Layout(), "tp2": Layout(tp=2), "tp4": Layout(tp=4), "tp8": Layout(tp=8)}
FUSED_MODELS = ("deepseek-v3-fused", "glm-4.5")
"""Models with a shared expert that the engine runs as one more routed expert if it uses the Triton runner."""
INT4_GROUPS = {"kimi-k2.5": 32, "glm-4.5": 32}
"""Number of INT4 weights that share a scale, by model. In models without an entry, 128 weights share a scale."""
ROUTED_SCALING_FACTOR = 2.5
CHECKED_TOKENS = 48
"""Number of tokens of a batch whose outputs are also computed in float32."""


@dataclass(frozen=True)
class Variant:
    """Settings of moe-workspace for one measurement of a layer.

    :param slices: fixed number of slices; ``None``: moe-workspace's own rule chooses the width of a slice.
    :param mb: value of ``SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB``.
    :param copies: whether Marlin's slices copy their columns. Without copies the answers are wrong. The time without
        copies shows what permuting the weights at load time would gain.
    :param offered: whether the output tensor is offered to the runner, as a server's layer offers its dead input.
    """

    slices: int | None = None
    mb: int | None = None
    copies: bool = True
    offered: bool = False


class Batch(ABC):
    """One MoE layer with the input of one call."""

    @abstractmethod
    def run(self) -> torch.Tensor:
        """Call the layer as the engine does. Patches that are active now apply.

        :returns: output of the layer, [tokens, hidden].
        """

    @abstractmethod
    def first(self, tokens: int) -> Batch:
        """Make a batch of the first ``tokens`` tokens."""

    def restore(self) -> None:
        """Restore the input, which an in-place layer has overwritten."""
        return

    def expected(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Compute the layer's outputs for ``CHECKED_TOKENS`` tokens in float32.

        :returns: indices of the tokens and their outputs. ``None`` if the runner needs no such check, because its
            outputs must equal the stock outputs bit by bit.
        """
        return None


class Runner(ABC):
    """Wrapper of an engine function that moe-workspace replaces. It runs the function stock or with moe-workspace.

    :ivar column_ranges: first and last column of each slice in the last call that ran in slices.
    """

    in_place = True
    """Whether a call overwrites its input. Several calls then need :meth:`Batch.restore` in between."""
    rule: str
    """Name of the function in ``column_slices`` that chooses the width of a slice."""

    def __init__(self, plan: Plan, module: Any, function: str, slices_in: Any) -> None:
        if plan.install is None:
            print(f"moe_workspace: {plan}", file=sys.stderr)
            raise SystemExit(2)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float16
        self.column_ranges: list[tuple[int, int]] = []
        self.dead_input: torch.Tensor | None = None
        self._install, self._module, self._function = plan.install, module, function
        self.stock = getattr(module, function)
        self._patched: dict[tuple[int | None, bool, bool], Any] = {}
        choose_column_slices = slices_in.choose_column_slices

        def record_slices(*args: Any) -> list[tuple[int, int]]:
            self.column_ranges = choose_column_slices(*args)
            return self.column_ranges

        slices_in.choose_column_slices = record_slices

    @abstractmethod
    def layer(self, model: str, layout: str, weights: str) -> Any:
        """Make one rank's layer with random weights.

        :param model: key of ``MODELS``.
        :param layout: key of ``LAYOUTS``.
        :param weights: dtype of the weights.
        """

    @abstractmethod
    def batch(self, layer: Any, tokens: int) -> Batch:
        """Make a batch of random tokens from a fixed seed."""

    def warm_up(self) -> None:
        """Let the engine compile its kernels before the first measurement."""
        return

    @abstractmethod
    def slice_step(self, gemm: Any) -> int:
        """Return the alignment of a slice's width: the width must be a multiple of this number of columns.

        :param gemm: description of the GEMM, as moe-workspace's rule receives it.
        """

    @contextmanager
    def use(self, variant: Variant | None) -> Iterator[None]:
        """Within the block, run layers with the settings of ``variant``. With ``None``, layers run stock."""
        if variant is None:
            yield
            return
        slices, before = variant.slices, {name: getattr(column_slices, name) for name in (self.rule, *UNLIMITED)}

        def width(layer: Any, gemm: Any, max_bytes: int | None = None) -> int:
            step = self.slice_step(gemm)
            return min(layer.hidden, -(-layer.hidden // (slices * step)) * step)

        if slices:
            for name, value in {self.rule: width, **UNLIMITED}.items():
                setattr(column_slices, name, value)
        self.column_ranges = []
        try:
            setattr(self._module, self._function, self._with_change(variant))
            with channel.moe_output_buffer_ctx(self.dead_input) if variant.offered else nullcontext():
                yield
        finally:
            setattr(self._module, self._function, self.stock)
            for name, value in before.items():
                setattr(column_slices, name, value)

    def _with_change(self, variant: Variant) -> Any:
        """Install moe-workspace with a variant's settings. Return the function that replaces the engine's function."""
        key = (variant.mb, variant.copies, bool(variant.slices))
        if key not in self._patched:
            name, copying = column_slices.MOE_WORKSPACE_MB.name, sum_and_copy.sum_and_copy
            os.environ[name] = "" if variant.mb is None else str(variant.mb)
            if not variant.copies:
                sum_and_copy.sum_and_copy = _sum_without_copies
            try:
                self._install(Patcher())
            finally:
                del os.environ[name]
                sum_and_copy.sum_and_copy = copying
            self._patched[key] = getattr(self._module, self._function)
        return self._patched[key]


def _sum_without_copies(expert_outputs: Any, output: Any, scale: float, copies: Any) -> None:
    """Add up the outputs of the experts. This function replaces moe-workspace's ``sum_and_copy``, which also copies
    columns of weights."""
    moe_sum.moe_sum(expert_outputs, output, scale)


UNLIMITED = {"MIN_TENSOR_BYTES": 1, "MAX_SLOWDOWN_FRACTION": float("inf")}
"""Values of two constants in ``column_slices``. With them, moe-workspace cuts every tensor, however small it is and
however much time slices cost. Measurements with a fixed number of slices use them."""


def rank_sizes(model: str, layout: str, *, fused: bool) -> Rank:
    """Return the sizes of one rank's part of a MoE layer.

    :param fused: whether the shared expert of a model in ``FUSED_MODELS`` runs as one more routed expert.
    """
    known = MODELS[model]
    fuses = fused and model in FUSED_MODELS and known.shared_experts
    return (fuse(known) if fuses else known).per_rank(LAYOUTS[layout])


# --- Triton ----------------------------------------------------------------------------------------------------------


class TritonRunner(Runner):
    """The engine's ``FusedMoE.run_moe_core`` with the Triton runner. By the engine's default, the output overwrites the
    input.
    """

    rule = "choose_slice_width"

    def __init__(self) -> None:
        warnings.filterwarnings("ignore")
        os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one process needs no network
        from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

        super().__init__(triton.plan(), fused_moe, "_fused_moe_kernel_sequence", deferred_tensor)
        self._set_up_engine()

    def _set_up_engine(self) -> None:
        """Publish server arguments and initialize one rank's process groups, as the engine does before it builds a
        model.
        """
        from sglang.srt import server_args as module
        from sglang.srt.distributed import parallel_state
        from sglang.srt.layers import dp_attention
        from sglang.srt.layers.moe import initialize_moe_config

        try:
            arguments: Any = module.ServerArgs(model_path="dummy")
        except Exception:
            names = module.ServerArgs.__dataclass_fields__
            arguments = SimpleNamespace(**dict.fromkeys(names), enable_deterministic_inference=False)
        for name, value in {
            "moe_a2a_backend": "none",
            "moe_runner_backend": "triton",
            "ep_num_redundant_experts": 0,
            "enable_fused_moe_sum_all_reduce": False,
            "device": self.device.type,
        }.items():
            setattr(arguments, name, value)
        module.set_global_server_args_for_scheduler(arguments)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        parallel_state.init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"tcp://127.0.0.1:{port}",
            backend="nccl" if self.device.type == "cuda" else "gloo",
        )
        parallel_state.initialize_model_parallel()
        try:
            dp_attention.initialize_dp_attention(arguments, SimpleNamespace(hidden_size=0, dtype=self.dtype))
        except Exception as error:
            print(f"moe_workspace: continues without data-parallel attention: {error}", flush=True)
        initialize_moe_config(arguments)

    def layer(self, model: str, layout: str, weights: str) -> Any:
        """Make a layer; see :meth:`Runner.layer`.

        :param weights: ``bf16`` or ``fp8``.
        """
        from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

        rank, quantization = rank_sizes(model, layout, fused=True), None
        if weights == "fp8":
            from sglang.srt.layers.quantization.fp8 import Fp8Config

            quantization = Fp8Config(
                is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128]
            )
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with self.device:
                layer = FusedMoE(
                    num_experts=rank.experts,
                    hidden_size=rank.hidden,
                    intermediate_size=rank.intermediate,
                    layer_id=0,
                    top_k=rank.top_k,
                    params_dtype=self.dtype,
                    quant_config=quantization,
                    routed_scaling_factor=ROUTED_SCALING_FACTOR,
                    prefix="experts",
                )
        finally:
            torch.set_default_dtype(before)
        generator = torch.Generator(self.device).manual_seed(0)
        with torch.no_grad():
            for weight, fan_in in ((layer.w13_weight, rank.hidden), (layer.w2_weight, rank.intermediate)):
                for expert in weight.data:
                    drawn = torch.randn(expert.shape, device=self.device, dtype=torch.float32, generator=generator)
                    expert.copy_((drawn * (100 if weights == "fp8" else 1) * fan_in**-0.5).to(expert.dtype))
            for name in ("w13_weight_scale_inv", "w2_weight_scale_inv"):
                if hasattr(layer, name):
                    data = getattr(layer, name).data
                    data.copy_((0.5 + torch.rand(data.shape, device=self.device, generator=generator)) / 100)
        if quantization is not None:
            layer.quant_method.process_weights_after_loading(layer)
        layer.rank = rank
        return layer

    def batch(self, layer: Any, tokens: int) -> TritonBatch:
        from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        generator = torch.Generator(self.device).manual_seed(1)
        logits = torch.randn(tokens, layer.rank.experts, device=self.device, generator=generator)
        best = logits.topk(layer.rank.top_k, dim=1)
        pristine = torch.randn(tokens, layer.rank.hidden, device=self.device, generator=generator).to(self.dtype)
        routed = StandardTopKOutput(
            topk_weights=torch.softmax(best.values, 1).contiguous(),
            topk_ids=best.indices.to(torch.int32).contiguous(),
            router_logits=logits.to(self.dtype),
        )
        dispatch = StandardDispatchOutput(hidden_states=pristine.clone(), hidden_states_scale=None, topk_output=routed)
        return TritonBatch(layer, pristine, dispatch)

    def slice_step(self, gemm: Any) -> int:
        return math.lcm(column_slices.SLICE_ALIGNMENT_COLUMNS, gemm.tiles["BLOCK_SIZE_N"])


@dataclass
class TritonBatch(Batch):
    """Batch in the form in which the dispatcher passes tokens to the Triton runner."""

    layer: Any
    pristine: torch.Tensor
    dispatch: Any

    def run(self) -> torch.Tensor:
        output: torch.Tensor = self.layer.run_moe_core(dispatch_output=self.dispatch).hidden_states
        return output

    def restore(self) -> None:
        self.dispatch.hidden_states.copy_(self.pristine)

    def first(self, tokens: int) -> TritonBatch:
        routed = self.dispatch.topk_output
        dispatch = self.dispatch._replace(
            hidden_states=self.pristine[:tokens].clone(), topk_output=type(routed)(*(t[:tokens] for t in routed))
        )
        return TritonBatch(self.layer, self.pristine[:tokens], dispatch)


# --- Marlin ----------------------------------------------------------------------------------------------------------


class MarlinRunner(Runner):
    """The engine's ``fused_marlin_moe`` with INT4 weights, called as the engine's Marlin runner calls it."""

    in_place = False
    rule = "choose_packed_slice_width"

    def __init__(self) -> None:
        # In some releases, ServerArgs raises an error without a real model. Marlin needs none of the arguments.
        with suppress(Exception):
            from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

            set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
        plan = marlin.plan()
        super().__init__(plan, engine.import_module(marlin.MODULE) if plan.install else None, marlin.NAME, marlin)

    def layer(self, model: str, layout: str, weights: str = "int4") -> MarlinLayer:
        return MarlinLayer(rank_sizes(model, layout, fused=False), INT4_GROUPS.get(model, 128), self.device, self.dtype)

    def batch(self, layer: MarlinLayer, tokens: int) -> MarlinBatch:
        generator = torch.Generator(self.device).manual_seed(1)
        logits = torch.randn(tokens, layer.rank.experts, device=self.device, generator=generator)
        best = torch.softmax(logits, -1).topk(layer.rank.top_k, dim=1)
        drawn = torch.randn(tokens, layer.rank.hidden, device=self.device, generator=generator)
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        arguments = layer.weights | {
            "hidden_states": (drawn * 0.5).to(self.dtype),
            "gating_output": logits,
            "topk_weights": (best.values / best.values.sum(-1, keepdim=True)).contiguous(),
            "topk_ids": best.indices.to(torch.int32).contiguous(),
            "workspace": torch.zeros(4 * processors, dtype=torch.int32, device=self.device),
            "num_bits": 4,
            "routed_scaling_factor": ROUTED_SCALING_FACTOR,
        }
        return MarlinBatch(self._module, layer, arguments)

    def warm_up(self) -> None:
        batch = self.batch(MarlinLayer(Rank(8, 4, 512, 128), 32, self.device, self.dtype), 4096)
        for variant in (None, Variant(slices=2)):
            with self.use(variant):
                batch.run()

    def slice_step(self, gemm: Any) -> int:
        return column_slices.MARLIN_ALIGNMENT_COLUMNS


class MarlinLayer:
    """One rank's layer with random INT4 weights, packed as by the engine's loader.

    :param group: number of weights that share a scale.
    """

    def __init__(self, rank: Rank, group: int, device: torch.device, dtype: torch.dtype) -> None:
        self.rank, self.group = rank, group
        generator = torch.Generator(device).manual_seed(0)

        def packed(k: int, n: int) -> torch.Tensor:
            weights = torch.empty(rank.experts, k // 16, 2 * n, dtype=torch.int32, device=device)
            for expert in weights:
                expert.random_(-(2**31), 2**31 - 1, generator=generator)
            return weights

        def scales(k: int, n: int) -> torch.Tensor:
            drawn = torch.rand(rank.experts, k // group, n, device=device, generator=generator)
            return ((0.5 + drawn) * k**-0.5 / 4.6).to(dtype)

        hidden, inner = rank.hidden, rank.intermediate
        self.weights = {
            "w1": packed(hidden, 2 * inner),
            "w2": packed(inner, hidden),
            "w1_scale": scales(hidden, 2 * inner),
            "w2_scale": scales(inner, hidden),
        }

    def sizes(self) -> dict[str, Any]:
        """Return the sizes from which moe-workspace's rule computes the cost of slices."""
        rank, weights = self.rank, self.weights
        return {
            "sizes": [rank.experts, rank.top_k, rank.hidden, rank.intermediate],
            "w2_bytes": weights["w2"].nbytes + weights["w2_scale"].nbytes,
            "weight_bytes": sum(tensor.nbytes for tensor in weights.values()),
        }

    def in_float(self, name: str, expert: int) -> torch.Tensor:
        """Unpack one expert's weights to float32, [k, n].

        :param name: ``w1`` or ``w2``.
        """
        from sglang.srt.layers.quantization.marlin_utils import get_scale_perms
        from sglang.srt.layers.quantization.moe_wna16 import get_weight_perm

        packed, scales = self.weights[name][expert], self.weights[f"{name}_scale"][expert].float()
        shifts = torch.arange(0, 32, 4, device=packed.device)
        places = get_weight_perm(4).to(packed.device)
        stored = ((packed.unsqueeze(-1) >> shifts) & 15).view(-1, len(places))
        tiles = torch.empty_like(stored)
        tiles[:, places] = stored
        k_tiles, n = len(packed), packed.shape[1] // 2
        values = tiles.view(k_tiles, n // 16, 16, 16).permute(0, 2, 1, 3).reshape(16 * k_tiles, n).float() - 8
        order = torch.tensor(get_scale_perms()[0], device=packed.device)
        in_order = torch.empty_like(scales).view(-1, 64)
        in_order[:, order] = scales.view(-1, 64)
        return values * in_order.view(scales.shape).repeat_interleave(self.group, 0)


@dataclass
class MarlinBatch(Batch):
    """Batch in the form of the keyword arguments of ``fused_marlin_moe``."""

    module: Any
    layer: MarlinLayer
    arguments: dict[str, Any]

    def run(self) -> torch.Tensor:
        output: torch.Tensor = getattr(self.module, marlin.NAME)(**self.arguments)
        return output

    def first(self, tokens: int) -> MarlinBatch:
        by_token = ("hidden_states", "gating_output", "topk_weights", "topk_ids")
        cut = {name: self.arguments[name][:tokens] for name in by_token}
        return MarlinBatch(self.module, self.layer, self.arguments | cut)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = len(self.arguments["hidden_states"])
        checked = torch.arange(0, tokens, max(1, tokens // CHECKED_TOKENS))[:CHECKED_TOKENS]
        x, ids, weights = (
            self.arguments[name][checked.to(self.arguments[name].device)]
            for name in ("hidden_states", "topk_ids", "topk_weights")
        )
        output = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in ids.unique().tolist():
            rows, places = (ids == expert).nonzero(as_tuple=True)
            gate, up = (x[rows].float() @ self.layer.in_float("w1", expert)).chunk(2, -1)
            down = (torch.nn.functional.silu(gate) * up) @ self.layer.in_float("w2", expert)
            output.index_add_(0, rows, down * weights[rows, places].unsqueeze(1))
        return checked, output * ROUTED_SCALING_FACTOR


RUNNERS: dict[str, type[TritonRunner] | type[MarlinRunner]] = {"triton": TritonRunner, "marlin": MarlinRunner}
