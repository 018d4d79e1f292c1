"""The engine's own model runner in the test's process: model, KV cache, forward; no server, no scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


class InProcess:
    """One model runner, whose model can be exchanged for another one with as many layers.

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

    def load(self, checkpoint: Path) -> Any:
        """A further model, built and loaded by the engine as at start-up, with whatever is patched right now."""
        from sglang.srt.configs.device_config import DeviceConfig
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.eplb import expert_location
        from sglang.srt.model_loader import get_model

        config = ModelConfig.from_server_args(self.server_args, model_path=str(checkpoint))
        # The weights are loaded by it: it must know this model's number of experts.
        locations = expert_location.compute_initial_expert_location_metadata(self.server_args, config, 0)
        expert_location._global_expert_location_metadata = locations
        return get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu", 0))

    @staticmethod
    def tokenizer_of(checkpoint: Path) -> Any:
        from sglang.srt.utils.hf_transformers_utils import get_tokenizer

        return get_tokenizer(str(checkpoint))

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
