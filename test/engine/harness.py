"""The engine's own model runner in the test's process: model, KV cache, forward; no server, no scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


class InProcess:
    """One model runner, whose model can be exchanged for another one of the same shape.

    :param checkpoint: a folder written by ``make-model``.
    """

    def __init__(self, checkpoint: Path, **server_arguments: Any) -> None:
        from sglang.bench_one_batch import load_model
        from sglang.srt.layers.moe import initialize_moe_config
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import PortArgs, ServerArgs, set_global_server_args_for_scheduler

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
        set_global_server_args_for_scheduler(self.server_args)
        initialize_moe_config(self.server_args)
        bench, self.tokenizer = load_model(self.server_args, PortArgs.init_new(self.server_args), 0, 0)
        self.runner = bench.torch_runner

    @contextmanager
    def arguments(self, **server_arguments: Any) -> Iterator[None]:
        """Within the block, models are built and run under these server arguments instead."""
        from sglang.srt.layers.moe import initialize_moe_config

        saved = {name: getattr(self.server_args, name) for name in server_arguments}
        try:
            for name, value in server_arguments.items():
                setattr(self.server_args, name, value)
            initialize_moe_config(self.server_args)
            yield
        finally:
            for name, value in saved.items():
                setattr(self.server_args, name, value)
            initialize_moe_config(self.server_args)

    def load(self, checkpoint: Path) -> Any:
        """A further model, built and loaded by the engine as at start-up, with whatever is patched right now."""
        from sglang.srt.configs.device_config import DeviceConfig
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.model_loader import get_model

        config = ModelConfig.from_server_args(self.server_args, model_path=str(checkpoint))
        return get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu", 0))

    def generate(self, model: Any, prompts: list[list[int]], steps: int) -> tuple[list[list[int]], torch.Tensor]:
        """Greedy tokens for each prompt, and the logits of every step, [steps + 1, prompts, vocabulary]."""
        from sglang.bench_one_batch import decode, extend, prepare_synthetic_inputs_for_latency_test

        self.runner.model = model
        self.runner.req_to_token_pool.clear()
        self.runner.token_to_kv_pool_allocator.clear()
        requests = prepare_synthetic_inputs_for_latency_test(len(prompts), 0, prompts)
        tokens, logits, batch = extend(requests, self.runner)
        all_tokens, all_logits = [tokens], [logits]
        for _ in range(steps):
            tokens, logits = decode(tokens, batch, self.runner)
            all_tokens.append(tokens)
            all_logits.append(logits)
        return torch.stack(all_tokens).T.tolist(), torch.stack(all_logits)


def padded_tokens(monkeypatch: Any, counts: list[int], attn_tp: int, extend: bool) -> list[int]:
    """Tokens of each data-parallel rank as the engine's own preparation of a forward pads them.

    :param counts: tokens that each rank's scheduler brings.
    :param attn_tp: tensor-parallel ranks within a data-parallel one.
    """
    from sglang.srt.batch_overlap import two_batch_overlap
    from sglang.srt.layers import dp_attention
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
        patch.setattr(forward_batch_info, "get_attention_cp_size", lambda: 1)
        patch.setattr(dp_attention, "get_attention_dp_size", lambda: len(counts))
        # Pinned memory needs a GPU.
        patch.setattr(torch, "tensor", lambda data, pin_memory=False, **kwargs: tensor(data, **kwargs))
        ForwardBatch.prepare_mlp_sync_batch(batch, SimpleNamespace(is_draft_worker=False))
    return list(dp_attention.get_dp_global_num_tokens())
