"""A client of servers that speak OpenAI's HTTP interface (vLLM, SGLang, llama.cpp, TGI, OpenAI).

Requests run in a bounded number of threads; what may pass (overload, a restart, a lost connection,
an answer cut short) is tried again with growing, jittered pauses. A client that waits for outages
retries a server that is away until it has been away for `outage_s`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, thread
from functools import partial
from typing import Any, TypeVar

from rllib_llm.shared.arguments import Count, Pause, Seconds, checked
from rllib_llm.shared.errors import Problems, require
from rllib_llm.shared.remote import Outage, ServerError, backoff_seconds

logger = logging.getLogger(__name__)

RETRIED_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
AWAY_STATUS = frozenset({429, 502, 503, 504})  # of a server that can answer nothing now
MISSING = "engines and judges on a server need httpx: pip install 'rllib-llm[openai]'."

Answer = TypeVar("Answer")
JUDGE_OUTAGE_S = 600.0  # that a judge or reward service may be away


class RequestRefusedError(Problems):
    """The server refuses the request itself (wrong key, unknown model): asking again is no use."""


@checked
class OpenAIClient:
    """Sends JSON to one server, concurrently, with retries.

    Args:
        base_url: up to and including the version, such as "http://localhost:8000/v1".
        api_key_env: environment variable that holds the key; without it none is sent.
        timeout_s: seconds that one attempt may take.
        max_attempts: attempts per request.
        max_concurrency: requests under way at once.
        first_delay_s: pause before the second attempt; it doubles up to `max_delay_s`, times a
            random factor of 0.5 to 1.5. A server's Retry-After goes before it.
        outage_s: seconds that a server may be away (no connection, 429, 502, 503, 504) before its
            requests fail, whatever `max_attempts`; 0: no outage is waited for.
        outage_setting: what the user calls `outage_s`, for the error.

    A client can be pickled; the copy opens new connections.

    Raises:
        ImportError: httpx is not installed.
        Problems: a setting out of range, or one that is not known.
    """

    def __init__(
        self, base_url: Any, *, api_key_env: str = "OPENAI_API_KEY", timeout_s: Seconds = 120.0,
        max_attempts: Count = 5, max_concurrency: Count = 32, first_delay_s: Pause = 0.5,
        max_delay_s: Pause = 30.0, outage_s: Pause = 0.0, outage_setting: str = "outage_s",
    ) -> None:  # fmt: skip
        self._arguments = {name: each for name, each in locals().items() if name != "self"}
        require(str(base_url).startswith(("http://", "https://")), "base_url", base_url, "start "
                "with http:// or https://", "", "Write it up to the version, such as "
                "http://localhost:8000/v1")  # fmt: skip
        try:
            import httpx
        except ImportError as error:
            raise ImportError(f"{MISSING} ({error})") from error
        self._outage = Outage(base_url, outage_s, setting=outage_setting)
        key = os.environ.get(api_key_env, "")
        self.base_url = base_url.rstrip("/")
        self._max_attempts = max_attempts
        self._first_delay_s, self._max_delay_s = first_delay_s, max_delay_s
        self._jitter = random.Random()  # nothing is drawn from the global state
        self._transport_errors = httpx.TransportError
        self._silences = httpx.ReadTimeout, httpx.WriteTimeout  # of one request, maybe
        self._lock, self._closing = threading.Lock(), threading.Event()
        self.num_retries = 0  # of all requests so far
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=max_concurrency),
        )
        self._threads = ThreadPoolExecutor(max_concurrency, thread_name_prefix="openai-client")

    def __getstate__(self) -> dict[str, Any]:
        return self._arguments

    def __setstate__(self, arguments: dict[str, Any]) -> None:
        self.__init__(**arguments)  # type: ignore[misc]

    def submit(
        self, path: str, body: dict[str, Any], read: Callable[[Any], Answer],
        headers: Mapping[str, str] | None = None,
    ) -> Future[Answer]:  # fmt: skip
        """Starts `post` in the background."""
        return self._threads.submit(partial(self.post, path, body, read, headers))

    def post(
        self, path: str, body: dict[str, Any], read: Callable[[Any], Answer],
        headers: Mapping[str, str] | None = None, *, is_json: bool = True,
    ) -> Answer:  # fmt: skip
        """Posts `body` and returns `read` of the server's answer.

        `path`: below base_url; `read`: from the decoded JSON (or the text) to the answer; KeyError,
        IndexError, TypeError or ValueError of it say that it is malformed, which is tried again.

        Raises:
            RequestRefusedError: the server will not answer this, whenever it is asked.
            ServerError: no usable answer in `max_attempts`.
        """
        url, attempt = f"{self.base_url}/{path}", 0
        while True:
            wait_s = backoff_seconds(
                attempt, self._jitter.uniform, self._first_delay_s, self._max_delay_s
            )
            try:
                response = self._http.post(url, json=body, headers=headers)
                is_away = response.status_code in AWAY_STATUS
            except self._transport_errors as error:
                response, reason = None, f"{type(error).__name__}: {error}"
                is_away = not isinstance(error, self._silences)
            if response is not None:  # a time-out is no answer
                if not is_away:
                    self._outage.end()
                if response.status_code == 200:
                    try:
                        return read(response.json() if is_json else response.text)
                    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
                        reason = f"malformed ({error!r}): {response.text[:200]!r}"
                elif response.status_code in RETRIED_STATUS:
                    reason = f"status {response.status_code}: {response.text[:200]!r}"
                    with contextlib.suppress(KeyError, ValueError):  # it names none, or a date
                        asked_s = float(response.headers["retry-after"])
                        wait_s = min(self._max_delay_s, max(0.0, asked_s))
                else:
                    raise RequestRefusedError(
                        url, "accept the request", f"it answered {response.status_code} "
                        f"{response.text[:500]!r}", "Check base_url, model and the API key's "
                        "environment variable",
                    )  # fmt: skip
            attempt += 1
            left_s = self._outage.waits(reason) if is_away else 0.0
            if left_s:
                wait_s = min(wait_s, left_s)
            elif is_away:
                self._outage.give_up(reason)
            if attempt >= self._max_attempts and not left_s:
                break
            with self._lock:
                self.num_retries += 1
                is_first = self.num_retries == 1
            if is_first:
                logger.warning(
                    "%s gave no answer (%s): it is asked again in %.1f s, %d times at most. Later "
                    "retries are only counted.", url, reason, wait_s, self._max_attempts - 1,
                )  # fmt: skip
            if self._is_closing(wait_s):
                break
        raise ServerError(f"{url} must answer within max_attempts={self._max_attempts}: the last "
                          f"attempt gave {reason}. Check the server, raise timeout_s, or lower "
                          "max_concurrency.")  # fmt: skip

    def _is_closing(self, wait_s: float) -> bool:
        """Waits; True where the client, or the process, ends meanwhile."""
        until = time.monotonic() + wait_s
        while (left := until - time.monotonic()) > 0:
            if self._closing.wait(min(left, 0.5)) or getattr(thread, "_shutdown", False):
                return True
        return False

    def close(self) -> None:
        """Waits for the requests under way, but for no retry, and closes the connections."""
        self._closing.set()
        self._threads.shutdown(cancel_futures=True)
        self._http.close()


def server_root(base_url: str) -> str:
    """The root of a server's other routes: `base_url` without a trailing "/v1"."""
    return base_url.rstrip("/").removesuffix("/v1")
