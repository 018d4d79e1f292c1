"""Run the engine's own model runner in this process: model, KV cache and forward pass, without server and scheduler."""

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
    """Import the engine's benchmark of one batch, which drives a model runner without a scheduler."""
    for name in ("sglang.benchmark.one_batch", "sglang.bench_one_batch"):
        if find_spec(name) is not None:
            return importlib.import_module(name)
    raise ImportError("this engine release has no benchmark of one batch")


class InProcess:
    """The engine's model runner with one model. The model can be replaced by another model with the same number of
    layers.

    The other model may be of another family. If it needs another kind of KV cache, a second KV cache is allocated.

    :param checkpoint: folder written by ``make-model``, or a folder without weights (``load_format="dummy"``).
    :param rank: this process's tensor-parallel rank. Each rank is a process with its own device.
    :param server_arguments: fields of the engine's ``ServerArgs``, instead of the defaults of this class.
    """

    def __init__(self, checkpoint: Path, rank: int = 0, **server_arguments: Any) -> None:
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import PortArgs, ServerArgs

        load_plugins()
        self.server_args = ServerArgs(
            model_path=str(checkpoint),
            **{
                "quantization": "modelopt_fp4",
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
        port = self.server_args.nccl_port  # a number only if several ranks connect through this port
        ports = SimpleNamespace(nccl_port=port) if port else PortArgs.init_new(self.server_args)
        loaded, self.tokenizer = self.bench.load_model(self.server_args, ports, rank, rank)
        self.runner = loaded.torch_runner
        self._caches = {self._cache_kind(self.runner.model.config): self.runner.token_to_kv_pool}

    def _publish(self) -> None:
        """Publish the server arguments to the engine's global state, as the engine does before it loads a model."""
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

        initialize_moe_config(*([self.server_args] if self._reads_arguments() else []))

    @staticmethod
    def _reads_arguments() -> bool:
        """Return whether this release's ``initialize_moe_config`` has the server arguments as a parameter. In other
        releases it reads them from the engine's global state (:meth:`_publish`).
        """
        from sglang.srt.layers.moe import initialize_moe_config

        return bool(inspect.signature(initialize_moe_config).parameters)

    @contextmanager
    def override_arguments(self, **server_arguments: Any) -> Iterator[None]:
        """Override server arguments within the block, for models that are built and run there."""
        with ExitStack() as stack:
            # At the end of the block, initialize the MoE settings again, after the arguments were restored.
            stack.callback(self._initialize_moe)
            for name, value in server_arguments.items():
                stack.enter_context(self._argument(name, value))
            self._initialize_moe()
            yield

    @contextmanager
    def _argument(self, name: str, value: Any) -> Iterator[None]:
        bags = [bag for bag in self._published_values() if hasattr(bag, name)]
        with ExitStack() as stack:
            # Some releases read settings from ServerArgs, some from the published arguments, and some from both.
            if self._reads_arguments():
                stack.callback(object.__setattr__, self.server_args, name, getattr(self.server_args, name))
                object.__setattr__(self.server_args, name, value)
            elif not bags:
                raise AttributeError(f"this release publishes no {name}")
            for bag in bags:
                stack.enter_context(bag.override(**{name: value}))
            yield

    @staticmethod
    def _published_values() -> tuple[Any, ...]:
        try:
            from sglang.srt.runtime_context import get_exec, get_memory, get_schedule, get_spec
        except ImportError:
            return ()
        return get_exec().moe, get_schedule(), get_spec(), get_memory()

    def load(self, checkpoint: Path) -> Any:
        """Build and load another model, as the engine does when it starts. Patches that are active now apply to it."""
        from sglang.srt.configs.device_config import DeviceConfig
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.eplb import expert_location
        from sglang.srt.model_loader import get_model

        config = ModelConfig.from_server_args(self.server_args, model_path=str(checkpoint))
        # Loading weights needs the expert locations of this model, because they depend on the number of experts. Some
        # releases compute the locations from ``ServerArgs``, other releases from the published arguments.
        compute = expert_location.compute_initial_expert_location_metadata
        location = compute(*(self.server_args, config, 0)[-len(inspect.signature(compute).parameters) :])
        publish = expert_location.set_global_expert_location_metadata
        if "allow_overwrite" in inspect.signature(publish).parameters:
            publish(location, allow_overwrite=True)
        else:
            expert_location._global_expert_location_metadata = location
        return get_model(
            model_config=config,
            load_config=LoadConfig(load_format=self.server_args.load_format),
            device_config=DeviceConfig(self.server_args.device, self.runner.gpu_id),
        )

    @staticmethod
    def tokenizer_of(checkpoint: Path) -> Any:
        """Load the tokenizer of a checkpoint, as the engine does."""
        from sglang.srt.utils.hf_transformers_utils import get_tokenizer

        return get_tokenizer(str(checkpoint))

    def generate(self, model: Any, prompts: list[list[int]], steps: int) -> tuple[list[list[int]], torch.Tensor]:
        """Generate tokens greedily.

        :returns: the tokens of each prompt, and the logits of every step, [steps + 1, prompts, vocabulary].
        """
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
        """Prefill a prompt in two parts: the first ``cut`` tokens, then the rest.

        :returns: logits after the whole prompt, [1, vocabulary].
        """
        self._use(model)
        requests = self.bench.prepare_synthetic_inputs_for_latency_test(1, 0, [prompt[:cut]])
        self.bench.extend(requests, self.runner)
        cut_at = SimpleNamespace(cut_len=cut)
        self.bench.prepare_extend_inputs_for_correctness_test(cut_at, [array("q", prompt)], requests, self.runner)
        (request,) = requests
        # In releases with ``fill_ids``, the engine's function above takes the prefix from row 0 of the request table.
        # It must come from the row of this request.
        if hasattr(request, "fill_ids"):
            prefix = self.runner.req_to_token_pool.req_to_token[request.req_pool_idx, :cut]
            request.prefix_indices = prefix.to(request.prefix_indices.dtype)
        _, logits, _ = self.bench.extend(requests, self.runner)
        return logits

    @staticmethod
    def _cache_kind(config: Any) -> tuple[int, int]:
        """Return the number of key-value heads and the size of a head. For MLA, return 0 and the size of a latent."""
        if hasattr(config, "kv_lora_rank"):
            return 0, config.kv_lora_rank
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return config.num_key_value_heads, size

    def _cache_for(self, config: Any) -> Any:
        """Return the KV cache for a model. If no KV cache of this kind exists, allocate one as the engine does."""
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        heads, size = kind = self._cache_kind(config)
        if kind not in self._caches:
            if not heads:
                raise ValueError("a model with latent attention needs an InProcess that started with such a model")
            own = self.runner.token_to_kv_pool
            self._caches[kind] = MHATokenToKVPool(
                own.size,
                page_size=own.page_size,
                dtype=own.dtype,
                head_num=heads,
                head_dim=size,
                layer_num=config.num_hidden_layers,
                device=own.device,
                enable_memory_saver=False,
            )
        return self._caches[kind]

    def _use(self, model: Any) -> None:
        self.runner.model = model
        self.runner.token_to_kv_pool = cache = self._cache_for(model.config)
        if hasattr(self.runner.attn_backend, "token_to_kv_pool"):  # the attribute exists from 0.5.13 on
            self.runner.attn_backend.token_to_kv_pool = cache
        self.runner.req_to_token_pool.clear()
        self.runner.token_to_kv_pool_allocator.clear()
