"""Requests to a server on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

LONGEST_S = 900.0
"""Seconds that an answer may take: a prefill of the longest context is slow."""
IDLE_WITHIN_S = 60.0
"""Seconds in which a server is to have nothing more to do, so that it can flush its cache."""


class Unanswered(RuntimeError):
    """No answer came; ``lost``: not because it took too long, the connection ended."""

    def __init__(self, error: Exception, lost: bool) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.lost = lost


class Client:
    """One connection pool for as many threads as want it, without the look for proxies that a library begins with."""

    def __init__(self, url: str) -> None:
        import httpx

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.Client(base_url=url, trust_env=False, timeout=LONGEST_S, limits=limits)

    def info(self) -> Mapping[str, Any]:
        """What the server resolved: ``/get_server_info``.

        :raises Unanswered: it does not say.
        """
        import httpx

        try:
            found = self._http.get("/get_server_info", timeout=60).raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            raise Unanswered(error, True) from None
        assert isinstance(found, dict)
        return found

    def metrics(self) -> str:
        """``/metrics``, where the server has any; "": it has none.

        :raises Unanswered: it does not say.
        """
        import httpx

        try:
            answer = self._http.get("/metrics/", timeout=60)
        except httpx.HTTPError as error:
            raise Unanswered(error, True) from None
        return answer.text if answer.status_code == 200 else ""

    def generate(
        self,
        prompts: list[list[int]],
        new_tokens: int,
        *,
        sampling: Mapping[str, Any] | None = None,
        patience_s: float = LONGEST_S,
    ) -> str:
        """Ask for all prompts in one request.

        :param sampling: how the next tokens are chosen, in the engine's words; ``None``: the likeliest.
        :param patience_s: seconds after which we go away, and the server notices.
        :returns: "", or what the server had against it.
        :raises Unanswered: no answer came.
        """
        chosen = {"temperature": 0.0, **(sampling or {}), "max_new_tokens": new_tokens, "ignore_eos": True}
        answer = self.post("/generate", {"input_ids": prompts, "sampling_params": chosen}, patience_s=patience_s)
        return "" if answer.status_code == 200 else f"HTTP {answer.status_code}: {answer.text[:300]}"

    def abort_all(self) -> None:
        """Abort what was asked for; nothing happens where the server is gone: whoever watches it says so."""
        with suppress(Unanswered):
            self.post("/abort_request", {"rid": "", "abort_all": True}, patience_s=60)

    def flush_cache(self) -> None:
        """Have the server forget all prompts, as soon as it has nothing to do.

        :raises Unanswered: no answer came, or it refuses, as where it has something to do after ``IDLE_WITHIN_S``.
        """
        answer = self.post(f"/flush_cache?timeout={IDLE_WITHIN_S:g}", {}, patience_s=2 * IDLE_WITHIN_S)
        if answer.status_code != 200:
            raise Unanswered(RuntimeError(f"/flush_cache: HTTP {answer.status_code}: {answer.text[:300]}"), False)

    def post(self, path: str, body: Any, *, patience_s: float = LONGEST_S) -> httpx.Response:
        """Whatever the server answers.

        :raises Unanswered: no answer came.
        """
        import httpx

        try:
            return self._http.post(path, json=body, timeout=patience_s)
        except httpx.HTTPError as error:
            raise Unanswered(error, not isinstance(error, httpx.TimeoutException)) from None
