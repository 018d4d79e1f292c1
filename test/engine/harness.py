"""Helpers of the in-process engine tests: record forward passes, keep tensors, replace the pool of symmetric memory."""

from __future__ import annotations

import ctypes
import functools
import inspect
import mmap
import sys
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from sglang_moe_patches.lab.observers import forwards


def watch_forwards(layer: Any, record: Any) -> None:
    """Call ``record(arguments, result)`` after each forward pass of a layer. ``del layer.forward`` ends the recording.

    This function replaces ``layer.forward``. A forward hook cannot be used, because a layer with a forward hook does
    not offer its dead input.
    """
    original = layer.forward
    signature = inspect.signature(original)

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        result = original(*args, **kwargs)
        record(given, result)
        return result

    layer.forward = forward


def same_answers(a: Any, b: Any) -> bool:
    """Return whether two answers are bit-identical. An answer is a pair of greedy tokens and logits."""
    return a[0] == b[0] and torch.equal(a[1], b[1])


class TensorRecorder:
    """Recorder of tensors, called from a hook. It keeps each tensor and a copy of the tensor's values."""

    def __init__(self) -> None:
        self.tensors: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, value: Any) -> None:
        tensor = value[0] if isinstance(value, tuple) else value
        if isinstance(tensor, torch.Tensor):
            self.tensors.append((tensor, tensor.clone()))

    def list_intact(self) -> list[bool]:
        """Return a boolean for each kept tensor: whether its values are unchanged."""
        return [torch.equal(tensor, before) for tensor, before in self.tensors]


def find_experts(model: Any) -> Any:
    """Return the first ``FusedMoE`` module of a model."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    return next(module for module in model.modules() if isinstance(module, FusedMoE))


def run_experts(experts: Any, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Run routed experts on a copy of ``rows``, and return a copy of their output.

    :param rows: the input, [tokens, hidden].
    :param ids: expert ids, [tokens, top-k].
    :param weights: routing weights, [tokens, top-k].
    """
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    routed = StandardTopKOutput(weights, ids.int(), torch.zeros(len(ids), experts.num_experts).bfloat16())
    with torch.inference_mode():
        return experts.run_moe_core(StandardDispatchOutput(rows.clone(), None, routed)).hidden_states.clone()


def make_norms_out_of_place(monkeypatch: Any) -> None:
    """Make all norms write their output to a new tensor, as they do with ``--enable-deterministic-inference``."""
    from sglang.srt.layers.layernorm import RMSNorm

    monkeypatch.setattr(RMSNorm, "forward_native", inspect.unwrap(RMSNorm.forward_native))


class Kernels:
    """Recorder of FlashInfer's MoE kernel calls. It fills each output with NaN before the kernel runs.

    ``calls`` has the address of each call's output, and ``marked`` whether the output had the engine's mark for a fused
    all-reduce. ``at_entry`` runs at the beginning of each call.
    """

    def __init__(self, monkeypatch, tmp_path):
        import flashinfer.fused_moe

        self.observer = forwards.Observer(str(tmp_path), ())
        self.at_entry = lambda: None
        self.calls = []
        self.marked = []
        for name in forwards.KERNELS:
            monkeypatch.setattr(flashinfer.fused_moe, name, self._watch(getattr(flashinfer.fused_moe, name)))

    def _watch(self, kernel):
        @functools.wraps(kernel)
        def run(*args, **kwargs):
            self.observer.start_kernel(kwargs["output"])
            self.calls.append(kwargs["output"].untyped_storage().data_ptr())
            self.marked.append(hasattr(kwargs["output"], "_sglang_needs_allreduce_fusion"))
            self.at_entry()
            kwargs["output"].fill_(float("nan"))  # code that still reads the old values then computes NaN
            return kernel(*args, **kwargs)

        return run

    def buffers_of(self, forward):
        """Run one forward pass. Return the number of MoE kernel calls and the number of distinct output buffers."""
        self.observer.start_forward(0, cuda=False)
        forward()
        return self.observer.kernels, self.observer.buffers


class Pool:
    """Stand-in for the pool of NCCL symmetric memory, which needs several GPUs.

    The pool allocates tensors from one region of memory, and reuses freed parts. To find out whether a tensor lies in
    the pool, the engine's own functions call :meth:`snapshot`, which lists the pool's blocks. ``walks`` counts these
    calls.
    """

    def __init__(self, monkeypatch: Any) -> None:
        from sglang.srt.distributed.device_communicators import pynccl_allocator

        self.walks = 0
        self._memory = mmap.mmap(-1, 1 << 28)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self.addresses: set[int] = set()
        self._module = pynccl_allocator
        monkeypatch.setattr(pynccl_allocator, "_mem_pool", self)
        for name, new in (("is_symmetric_memory_enabled", lambda: True), ("use_symmetric_memory", self._use)):
            original = getattr(pynccl_allocator, name)
            for module in list(sys.modules.values()):
                if getattr(module, "__dict__", {}).get(name) is original:
                    monkeypatch.setattr(module, name, new)
        for name in ("empty", "empty_like"):
            monkeypatch.setattr(torch, name, self._make_empty(getattr(torch, name)))

    def _use(self, group_coordinator: Any, disabled: bool = False) -> Any:
        return nullcontext() if disabled else self

    def __enter__(self) -> None:
        assert self._module._active_symmetric_memory_context is None  # the engine's contexts do not nest
        self._module._active_symmetric_memory_context = self

    def __exit__(self, *exception: Any) -> None:
        self._module._active_symmetric_memory_context = None

    def _make_empty(self, original: Any) -> Any:
        @functools.wraps(original)
        def empty(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            if self._module._active_symmetric_memory_context is None or not made.nbytes:
                return made
            return self._piece(made.nbytes).view(made.dtype).view(made.shape)

        return empty

    def _piece(self, size: int) -> torch.Tensor:
        offset = self._free[size].pop() if self._free.get(size) else self._end
        self._end = max(self._end, -(-(offset + size) // 512) * 512)
        piece = (ctypes.c_uint8 * size).from_buffer(self._memory, offset)
        weakref.finalize(piece, self._free.setdefault(size, []).append, offset)
        self.addresses.add(self._start + offset)
        return torch.frombuffer(piece, dtype=torch.uint8)

    def snapshot(self) -> list[dict[str, Any]]:
        self.walks += 1
        return [{"blocks": [{"address": address} for address in self.addresses]}]

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.addresses


def graph_arguments(requests: int, piecewise_tokens: int | None = None) -> dict[str, Any]:
    """Return the installed release's server arguments for CUDA graphs.

    :param requests: largest decode batch with a graph.
    :param piecewise_tokens: largest prefill with a graph, in tokens; ``None`` disables graphs of prefills.
    """
    from sglang.srt.server_args import ServerArgs

    if "cuda_graph_config" not in ServerArgs.__dataclass_fields__:
        return {
            "cuda_graph_max_bs": requests,
            "disable_piecewise_cuda_graph": piecewise_tokens is None,
            "piecewise_cuda_graph_max_tokens": piecewise_tokens,
        }
    from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, PhaseConfig

    prefill = Backend.DISABLED if piecewise_tokens is None else Backend.TC_PIECEWISE
    return {
        "cuda_graph_config": CudaGraphConfig(
            decode=PhaseConfig(backend=Backend.FULL, max_bs=requests),
            prefill=PhaseConfig(backend=prefill, max_bs=piecewise_tokens),
        )
    }


def load_unquantized(patch: Any) -> None:
    """Make the session's engine load models without quantization, until ``patch.undo()`` is called.

    :param patch: pytest's ``MonkeyPatch``.
    """
    from sglang.srt.configs.model_config import ModelConfig

    from_server_args = ModelConfig.from_server_args

    def unquantized(*args: Any, **kwargs: Any) -> Any:
        config = from_server_args(*args, **kwargs)
        config.quantization = None
        return config

    patch.setattr(ModelConfig, "from_server_args", unquantized)


def pad_tokens(monkeypatch: Any, counts: list[int], attn_tp: int, extend: bool) -> list[int]:
    """Pad the tokens of all data-parallel ranks with the engine's own preparation of a forward pass.

    :param counts: number of tokens in each rank's batch.
    :param attn_tp: number of tensor-parallel ranks within each data-parallel rank.
    :param extend: whether the batches are prefills. Otherwise they are decodes.
    :returns: number of tokens of each rank after padding.
    """
    from sglang.srt.batch_overlap import two_batch_overlap
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.utils import cp_utils
    from sglang.srt.model_executor import forward_batch_info
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    batch = SimpleNamespace(
        global_num_tokens_cpu=list(counts),
        global_num_tokens_for_logprob_cpu=list(counts),
        global_num_tokens_gpu=torch.zeros(len(counts), dtype=torch.int64),
        is_extend_in_batch=extend,
        batch_size=counts[0],
        forward_mode=ForwardMode.EXTEND if extend else ForwardMode.DECODE,
        spec_info=None,
        tbo_children=None,
        _pad_inputs_to_size=lambda *args: None,
    )
    tensor = torch.tensor
    with monkeypatch.context() as patch:
        patch.setattr(two_batch_overlap.TboForwardBatchPreparer, "prepare", lambda **kwargs: None)
        for name in ("get_attention_tp_size", "get_attention_dp_rank"):
            patch.setattr(forward_batch_info, name, lambda n=name: attn_tp if "tp" in n else 0)
        # Newer releases read the number of context-parallel ranks through another module.
        for module in (forward_batch_info, cp_utils):
            if hasattr(module, "get_attention_cp_size"):
                patch.setattr(module, "get_attention_cp_size", lambda: 1)
        patch.setattr(dp_attention, "get_attention_dp_size", lambda: len(counts))
        # Pinned memory needs a GPU.
        patch.setattr(torch, "tensor", lambda data, pin_memory=False, **kwargs: tensor(data, **kwargs))
        ForwardBatch.prepare_mlp_sync_batch(batch, SimpleNamespace(is_draft_worker=False))
    return list(dp_attention.get_dp_global_num_tokens())
