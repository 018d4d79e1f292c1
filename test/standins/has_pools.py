"""Engine plugin that gives a plain tiny model several kinds of KV pools, to test kv-sizing on the CPU.

With ``POOLS=windows`` the model has sliding windows, as gpt-oss has. With ``POOLS=states`` it has Mamba's states, as
Qwen3-Next has. The pools, their allocators, the prefix cache and the scheduler are the engine's own. Attention on the
CPU supports neither sliding windows nor states. For a layer with a sliding window, the plugin copies the pool's rows to
their positions in a full cache. The states are allocated and copied, but no layer reads them.
"""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace

import wrapt

WINDOW = int(os.environ.get("WINDOW", "32"))


def register():
    here = "sglang.srt."
    windows = {here + "configs.model_config": add_windows, here + "mem_cache.swa_memory_pool": read_windows}
    states = {
        here + "model_executor.model_runner": add_states,
        here + "configs.hybrid_arch": add_states,
        # this module of the engine has its own reference to the function
        here + "mem_cache.kv_cache_builder": add_states,
        here + "layers.attention.attention_registry": keep_attention_backend,
        here + "managers.schedule_batch": ignore_pinning,
    }
    for module, hook in {"windows": windows, "states": states}.get(os.environ.get("POOLS", ""), {}).items():
        wrapt.register_post_import_hook(hook, module)


def add_windows(module):
    derive = module.ModelConfig._derive_hybrid_model

    def with_windows(self):
        derive(self)
        self.sliding_window_size, self.swa_head_dim, self.swa_v_head_dim = WINDOW, self.head_dim, self.v_head_dim

    def layers(architectures, config, *more):
        every = list(range(config.num_hidden_layers))
        return every[::2], every[1::2]

    module.ModelConfig._derive_hybrid_model = with_windows
    module.is_hybrid_swa_model, module.get_hybrid_layer_ids = lambda *model: True, layers


def read_windows(module):
    import numpy
    import torch

    def spread_rows(original):
        def get(self, layer):
            found = original(self, layer)
            if not self.layers_mapping[layer][1]:
                return found
            mapping, row = self.full_to_swa_index_mapping, found[0]
            # The tensor has rows for millions of tokens. NumPy's zeros use memory only for rows that are written.
            rows = torch.from_numpy(numpy.zeros(len(mapping) * row.nbytes, numpy.uint8))
            rows = rows.view(found.dtype).view(len(mapping), *row.shape)
            there = (mapping > 0).nonzero().flatten()
            rows[there] = found[mapping[there]]
            return rows

        return get

    pool = module.SWAKVPool
    pool.get_key_buffer = spread_rows(pool.get_key_buffer)
    pool.get_value_buffer = spread_rows(pool.get_value_buffer)


def make_state_config():
    import torch
    from sglang.srt.configs import mamba_utils

    # The state of each request takes 1 MB.
    shape = mamba_utils.Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=64, n_groups=1, num_heads=64, head_dim=32, state_size=128, conv_kernel=4
    )
    kinds = mamba_utils.Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
    params = mamba_utils.Mamba2CacheParams(shape=shape, layers=[0], dtype=kinds)
    return SimpleNamespace(mamba2_cache_params=params, full_attention_layer_ids=list(range(64)))


def add_states(module):
    kept = functools.cache(make_state_config)
    if hasattr(module, "mamba2_config"):
        module.mamba2_config = lambda model_config: kept()
    elif hasattr(getattr(module, "ModelRunner", None), "mamba2_config"):
        module.ModelRunner.mamba2_config = property(lambda runner: kept())


def keep_attention_backend(module):
    module.attn_backend_wrapper = lambda runner, backend, *args, **kwargs: backend


def ignore_pinning(module):
    """Ignore requests for pinned memory. Pinned memory needs a GPU driver."""
    import torch

    original = torch.tensor
    torch.tensor = lambda *args, pin_memory=False, **kwargs: original(*args, **kwargs)
    torch.Tensor.pin_memory = lambda tensor: tensor
