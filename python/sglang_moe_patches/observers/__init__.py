"""What a server's process observes of itself, where ``regress`` or ``plan`` asks for it."""

LOOKS_AT = (
    (
        "`model_executor/model_runner.py`: `ModelRunner`'s methods from loading to capturing, `forward`; "
        "`forward_batch_info.py`",
        "which stages are there now (`observers/memory.py`, `STAGES`)? the batch's lengths and prefixes, the pools and "
        "`max_total_num_tokens` under which names?",
    ),
    (
        "`mem_cache/kv_cache_configurator.py`, `environ.py` (`…LOGPROB…CHUNK`), FlashInfer's routed-experts functions",
        "who sizes the KV cache? which switch cuts log-probabilities? which functions run the routed experts "
        "(`observers/forwards.py`, `KERNELS`)?",
    ),
)
"""As a change's ``looks_at``: the names that observing needs."""
