"""How many requests run at once beside a KV cache that was sized, where nobody has said it.

The engine's default allows thousands, and sampling may take eighteen numbers for each request and each token of the
vocabulary: 22 GB for 2,048 requests and 151,936 tokens, with which a server without this package ends. What memory is
kept for is rehearsed with as many requests as the largest decode graph has, and no batch becomes larger while one of
its requests asks for such sampling. Requests without it run as ever, as far as there was memory for them.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AtOnce:
    """Requests in one batch.

    :param requests: of any kind.
    :param penalized: where one of them is :func:`penalized`.
    """

    requests: int
    penalized: int


def penalized(request: Any) -> bool:
    """Whether the sampling of a request keeps or makes numbers for every token of the vocabulary, for its whole batch.

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


def limit(scheduler: Any, at_once: AtOnce) -> None:
    """Have a scheduler admit no more requests; those that wait are admitted when others have ended."""
    waiting: weakref.WeakSet[Any] = weakref.WeakSet()  # of penalized ones that have not ended
    queue, allocatable = scheduler._add_request_to_queue, scheduler.get_num_allocatable_reqs

    @functools.wraps(queue)
    def add_request_to_queue(req: Any, *args: Any, **kwargs: Any) -> Any:
        if penalized(req):
            waiting.add(req)
        return queue(req, *args, **kwargs)

    @functools.wraps(allocatable)
    def get_num_allocatable_reqs(running_bs: int, *args: Any, **kwargs: Any) -> int:
        most = at_once.penalized if any(not req.finished() for req in waiting) else at_once.requests
        return min(allocatable(running_bs, *args, **kwargs), most - running_bs)

    scheduler._add_request_to_queue = add_request_to_queue
    scheduler.get_num_allocatable_reqs = get_num_allocatable_reqs
