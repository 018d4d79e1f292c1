"""What a server's processes say of themselves, each observer active only where its variable names a folder.

No observer is imported here: every process of a server reads this list.
"""

from sglang_moe_patches.core.variables import OBSERVE, PLAN

OBSERVERS = ((OBSERVE, "forwards"), (PLAN, "memory"))
"""Variable and module, whose ``install(folder, plans)`` records this process into the folder, which must exist.

It takes what became of each change (:class:`patch.Plan` by name). What goes wrong with it ends no server.
"""
LOOKS_AT = (
    (
        "`model_executor/model_runner.py`: `ModelRunner`'s methods from loading to capturing, `forward`; "
        "`forward_batch_info.py`",
        "which stages (`observers/memory.py`, `STAGES`)? what are the batch's lengths and prefixes, the pools and "
        "`max_total_num_tokens` called?",
    ),
    (
        "`mem_cache/kv_cache_configurator.py`, `environ.py` (`…LOGPROB…CHUNK`), FlashInfer's routed-experts functions",
        "who sizes the KV cache? which switch cuts log-probabilities? which functions run the routed experts "
        "(`observers/forwards.py`, `KERNELS`)?",
    ),
)
"""As a change's ``looks_at``: the names that observing needs."""
