"""How many requests run at once beside a KV cache that was sized, where nobody has said it.

The engine's default allows thousands, and sampling may take eighteen numbers for each request and each token of the
vocabulary: 22 GB for 2,048 requests and 151,936 tokens, with which a server without this package ends. Such sampling is
rehearsed with as many requests as the largest decode graph has, and no batch becomes larger while one of its requests,
or one that waits, asks for it. Of other requests as many run at once as need no more memory than the other forwards:
more would take it from the KV cache.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any


def is_penalized(request: Any) -> bool:
    """Whether a request has penalties or the like: numbers for every token of the vocabulary, for its whole batch.

    :param request: the engine's ``Req``.
    """
    asked = request.sampling_params
    return bool(
        request.return_logprob
        or getattr(request, "custom_logit_processor", None)
        or asked.frequency_penalty
        or asked.presence_penalty
        or asked.repetition_penalty != 1.0
        or asked.min_p
        or asked.min_new_tokens
        or asked.logit_bias
    )


def limit(scheduler: Any, requests: int, penalized: int) -> None:
    """Have a scheduler admit no more requests than these to a batch; others wait until some have ended.

    :param requests: of any kind.
    :param penalized: while one that runs or waits :func:`is_penalized`.
    """
    with_penalties: weakref.WeakSet[Any] = weakref.WeakSet()
    queue, allocatable = scheduler._add_request_to_queue, scheduler.get_num_allocatable_reqs

    @functools.wraps(queue)
    def add_request_to_queue(req: Any, *args: Any, **kwargs: Any) -> Any:
        if is_penalized(req):
            with_penalties.add(req)
        return queue(req, *args, **kwargs)

    @functools.wraps(allocatable)
    def get_num_allocatable_reqs(running_bs: int, *args: Any, **kwargs: Any) -> int:
        most = penalized if any(not req.finished() for req in with_penalties) else requests
        return min(allocatable(running_bs, *args, **kwargs), most - running_bs)

    scheduler._add_request_to_queue = add_request_to_queue
    scheduler.get_num_allocatable_reqs = get_num_allocatable_reqs
