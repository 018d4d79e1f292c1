"""HTTP client for an engine server on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 900.0
"""Timeout of a request in seconds. It is long, because a prefill of the longest context is slow."""
IDLE_TIMEOUT_S = 60.0
"""Seconds that the server may take to become idle before it flushes its radix cache."""


class Unanswered(RuntimeError):
    """Error: the server did not answer a request.

    :param lost: whether the connection ended. Otherwise the request timed out.
    """

    def __init__(self, error: Exception, lost: bool) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.lost = lost


class Client:
    """Client that many threads can share. It ignores proxy settings, because the server is on this machine."""

    def __init__(self, url: str) -> None:
        import httpx

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.Client(base_url=url, trust_env=False, timeout=TIMEOUT_S, limits=limits)

    def info(self) -> Mapping[str, Any]:
        """Read ``/get_server_info``, which has the server's resolved arguments.

        :raises Unanswered: the server did not answer.
        """
        import httpx

        try:
            info = self._http.get("/get_server_info", timeout=60).raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            raise Unanswered(error, True) from None
        assert isinstance(info, dict)
        return info

    def metrics(self) -> str:
        """Read ``/metrics``. The text is empty if the server runs without ``--enable-metrics``.

        :raises Unanswered: the server did not answer.
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
        timeout_s: float = TIMEOUT_S,
    ) -> str:
        """Send all prompts in one ``/generate`` request.

        :param prompts: token ids of each prompt.
        :param new_tokens: number of tokens to generate for each prompt.
        :param sampling: the engine's sampling parameters; ``None``: greedy.
        :param timeout_s: seconds until the client closes the connection. The server then aborts the request.
        :returns: error of the server, or "".
        :raises Unanswered: the server did not answer.
        """
        parameters = {"temperature": 0.0, **(sampling or {}), "max_new_tokens": new_tokens, "ignore_eos": True}
        answer = self.post("/generate", {"input_ids": prompts, "sampling_params": parameters}, timeout_s=timeout_s)
        return "" if answer.status_code == 200 else f"HTTP {answer.status_code}: {answer.text[:300]}"

    def abort_all(self) -> None:
        """Abort all requests. If the server has ended, do nothing: ``Server.check`` reports that."""
        with suppress(Unanswered):
            self.post("/abort_request", {"rid": "", "abort_all": True}, timeout_s=60)

    def flush_cache(self) -> None:
        """Flush the radix cache as soon as the server is idle.

        :raises Unanswered: the server did not answer, or it was not idle within ``IDLE_TIMEOUT_S`` seconds.
        """
        answer = self.post(f"/flush_cache?timeout={IDLE_TIMEOUT_S:g}", {}, timeout_s=2 * IDLE_TIMEOUT_S)
        if answer.status_code != 200:
            raise Unanswered(RuntimeError(f"/flush_cache: HTTP {answer.status_code}: {answer.text[:300]}"), False)

    def post(self, path: str, body: Any, *, timeout_s: float = TIMEOUT_S) -> httpx.Response:
        """Send a POST request with a JSON body. Return the answer, whatever its status is.

        :raises Unanswered: the server did not answer.
        """
        import httpx

        try:
            return self._http.post(path, json=body, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise Unanswered(error, not isinstance(error, httpx.TimeoutException)) from None
