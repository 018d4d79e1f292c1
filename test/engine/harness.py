"""The engine's own model runner in the test's process: model, KV cache, forward; no server, no scheduler."""

from __future__ import annotations

import importlib
import inspect
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


def bench_module() -> Any:
    """The engine's own benchmark of one batch, which drives a model runner without a scheduler."""
    for name in ("sglang.benchmark.one_batch", "sglang.bench_one_batch"):
        if find_spec(name) is not None:
            return importlib.import_module(name)
    raise ImportError("this engine release has no benchmark of one batch")


class InProcess:
    """One model runner, whose model can be exchanged for another one with as many layers.

    :param checkpoint: a folder written by ``make-model``.
    """

    def __init__(self, checkpoint: Path, **server_arguments: Any) -> None:
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import PortArgs, ServerArgs

        load_plugins()
        self.server_args = ServerArgs(
            model_path=str(checkpoint),
            quantization="modelopt_fp4",
            **{
                "moe_runner_backend": "flashinfer_trtllm_routed",
                "device": "cpu",
                "attention_backend": "torch_native",
                "disable_overlap_schedule": True,
                "disable_cuda_graph": True,
                "disable_radix_cache": True,
                "max_total_tokens": 8192,
                **server_arguments,
            },
        )
        self.bench = bench_module()
        self._publish()
        ports = PortArgs.init_new(self.server_args)
        benchmarked, self.tokenizer = self.bench.load_model(self.server_args, ports, 0, 0)
        self.runner = benchmarked.torch_runner

    def _publish(self) -> None:
        """What the engine's processes do with the server's arguments before they load a model."""
        from sglang.srt import server_args

        try:
            from sglang.srt.runtime_context import SpawnRanks, publish
        except ImportError:
            server_args.set_global_server_args_for_scheduler(self.server_args)
        else:
            publish(self.server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        self._initialize_moe()

    def _initialize_moe(self) -> None:
        from sglang.srt.layers.moe import initialize_moe_config

        # Releases that publish the arguments read what is published.
        initialize_moe_config(*[self.server_args][: len(inspect.signature(initialize_moe_config).parameters)])

    @contextmanager
    def arguments(self, **server_arguments: Any) -> Iterator[None]:
        """Within the block, models are built and run under these server arguments instead."""
        with ExitStack() as stack:
            for name, value in server_arguments.items():
                stack.enter_context(self._argument(name, value))
            self._initialize_moe()
            yield
        self._initialize_moe()

    @contextmanager
    def _argument(self, name: str, value: Any) -> Iterator[None]:
        try:
            from sglang.srt.runtime_context import get_exec, get_memory, get_schedule, get_spec
        except ImportError:
            before = getattr(self.server_args, name)
            setattr(self.server_args, name, value)
            try:
                yield
            finally:
                setattr(self.server_args, name, before)
        else:
            bags = (get_exec().moe, get_schedule(), get_spec(), get_memory())
            with next(bag for bag in bags if hasattr(bag, name)).override(**{name: value}):
                yield

    def load(self, checkpoint: Path) -> Any:
        """A further model, built and loaded by the engine as at start-up, with whatever is patched right now."""
        from sglang.srt.configs.device_config import DeviceConfig
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.eplb import expert_location
        from sglang.srt.model_loader import get_model

        config = ModelConfig.from_server_args(self.server_args, model_path=str(checkpoint))
        # The weights are loaded by it: it must know this model's number of experts. (Releases that publish the
        # arguments read what is published.)
        compute = expert_location.compute_initial_expert_location_metadata
        location = compute(*(self.server_args, config, 0)[-len(inspect.signature(compute).parameters) :])
        publish = expert_location.set_global_expert_location_metadata
        if "allow_overwrite" in inspect.signature(publish).parameters:
            publish(location, allow_overwrite=True)
        else:
            expert_location._global_expert_location_metadata = location
        return get_model(
            model_config=config, load_config=LoadConfig(), device_config=DeviceConfig(self.server_args.device, 0)
        )

    @staticmethod
    def tokenizer_of(checkpoint: Path) -> Any:
        from sglang.srt.utils.hf_transformers_utils import get_tokenizer

        return get_tokenizer(str(checkpoint))

    def generate(self, model: Any, prompts: list[list[int]], steps: int) -> tuple[list[list[int]], torch.Tensor]:
        """Greedy tokens for each prompt, and the logits of every step, [steps + 1, prompts, vocabulary]."""
        self._use(model)
        requests = self.bench.prepare_synthetic_inputs_for_latency_test(len(prompts), 0, prompts)
        tokens, logits, batch = self.bench.extend(requests, self.runner)
        all_tokens, all_logits = [tokens], [logits]
        for _ in range(steps):
            tokens, logits = self.bench.decode(tokens, batch, self.runner)
            all_tokens.append(tokens)
            all_logits.append(logits)
        return torch.stack(all_tokens).T.tolist(), torch.stack(all_logits)

    def prefill_in_two(self, model: Any, prompt: list[int], cut: int) -> torch.Tensor:
        """The logits of a prompt whose first ``cut`` tokens were prefilled before the others, [1, vocabulary]."""
        self._use(model)
        requests = self.bench.prepare_synthetic_inputs_for_latency_test(1, 0, [prompt[:cut]])
        self.bench.extend(requests, self.runner)
        cut_at = SimpleNamespace(cut_len=cut)
        self.bench.prepare_extend_inputs_for_correctness_test(cut_at, [array("q", prompt)], requests, self.runner)
        (request,) = requests
        if hasattr(request, "fill_ids"):  # releases whose function reads row 0, whichever is the request's
            prefix = self.runner.req_to_token_pool.req_to_token[request.req_pool_idx, :cut]
            request.prefix_indices = prefix.to(request.prefix_indices.dtype)
        _, logits, _ = self.bench.extend(requests, self.runner)
        return logits

    def _use(self, model: Any) -> None:
        self.runner.model = model
        self.runner.req_to_token_pool.clear()
        self.runner.token_to_kv_pool_allocator.clear()


def graph_arguments(requests: int, piecewise_tokens: int | None = None) -> dict[str, Any]:
    """Server arguments that capture decodes of up to so many requests and, unless ``None``, prefills of so many tokens,
    in the words of the installed release."""
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


def padded_tokens(monkeypatch: Any, counts: list[int], attn_tp: int, extend: bool) -> list[int]:
    """Tokens of each data-parallel rank as the engine's own preparation of a forward pads them.

    :param counts: tokens that each rank's scheduler brings.
    :param attn_tp: tensor-parallel ranks within a data-parallel one.
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
        # Newer releases ask for the ranks of context parallelism through another module.
        for module in (forward_batch_info, cp_utils):
            if hasattr(module, "get_attention_cp_size"):
                patch.setattr(module, "get_attention_cp_size", lambda: 1)
        patch.setattr(dp_attention, "get_attention_dp_size", lambda: len(counts))
        # Pinned memory needs a GPU.
        patch.setattr(torch, "tensor", lambda data, pin_memory=False, **kwargs: tensor(data, **kwargs))
        ForwardBatch.prepare_mlp_sync_batch(batch, SimpleNamespace(is_draft_worker=False))
    return list(dp_attention.get_dp_global_num_tokens())
