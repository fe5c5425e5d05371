"""Who has a key, and what is left of its limits."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllib_llm.serving.errors import ApiError
from rllib_llm.serving.settings import ServeSettings
from rllib_llm.user_errors import UserError


class TokenBucket:
    """So many units per minute, of which a minute's may be used at once. What is used beyond, since
    nobody knew before, has to be waited for.

    Args:
        per_minute: None: no limit.
        clock: seconds.
    """

    def __init__(
        self, per_minute: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_minute, self._clock = per_minute, clock
        self._level, self._at = per_minute or 0.0, clock()

    def wait_seconds(self, units: float = 1.0) -> float:
        """Until so many units are there; 0 where they are. More than a minute's are never there:
        for them a full bucket will do."""
        if self._per_minute is None:
            return 0.0
        now = self._clock()
        filled = self._level + (now - self._at) * self._per_minute / 60
        self._level, self._at = min(self._per_minute, filled), now
        missing = min(units, self._per_minute) - self._level
        return max(0.0, missing * 60 / self._per_minute)

    def use(self, units: float) -> None:
        """Takes units out."""
        self._level -= units


@dataclass
class Client:
    """Who has a key, and what is left of its limits."""

    name: str
    key: bytes
    requests: TokenBucket
    tokens: TokenBucket

    def admit(self) -> None:
        """Counts a request.

        Raises:
            ApiError: 429, saying when to come again.
        """
        wait = max(self.requests.wait_seconds(), self.tokens.wait_seconds())
        if wait > 0:
            raise ApiError(
                429,
                f"The key {self.name!r} has used its requests or tokens of this minute: come again "
                f"in {wait:.1f} s.",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(max(1, round(wait + 0.5)))},
            )
        self.requests.use(1)


class Clients:
    """The keys of a server.

    Args:
        clients: all that have one; none: everybody may ask.
        admin_key: of the administration; None: it is off.
    """

    def __init__(self, clients: Sequence[Client], admin_key: bytes | None = None) -> None:
        self.clients, self._admin_key = list(clients), admin_key
        self._nobody = Client("", b"", TokenBucket(None), TokenBucket(None))

    def of(self, header: bytes | None) -> Client:
        """Whose bearer token it is.

        Raises:
            ApiError: 401.
        """
        if not self.clients:
            return self._nobody
        token = _bearer(header)
        # All are compared, so that the time tells nothing.
        found = [client for client in self.clients if hmac.compare_digest(client.key, token)]
        if not found:
            raise _no_key("Give the key as `Authorization: Bearer KEY`.")
        return found[0]

    def check_admin(self, header: bytes | None) -> None:
        """Raises ApiError, 403 where the administration is off, 401 for a wrong key."""
        if self._admin_key is None:
            raise ApiError(
                403, "The administration is off: the server was started without an admin_key.",
                code="admin_off",
            )  # fmt: skip
        if not hmac.compare_digest(self._admin_key, _bearer(header)):
            raise _no_key("The administration has a key of its own.")


def _bearer(header: bytes | None) -> bytes:
    kind, _, token = (header or b"").partition(b" ")
    return token.strip() if kind.lower() == b"bearer" else b""


def _no_key(remedy: str) -> ApiError:
    return ApiError(
        401, f"The API key is missing or wrong. {remedy}", code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )  # fmt: skip


def read_clients(settings: ServeSettings) -> Clients:
    """The keys that the settings name.

    Raises:
        UserError: a file that holds something else.
    """
    entries: list[Mapping[str, Any]] = []
    if settings.api_keys is not None:
        keys = filter(None, settings.api_keys.get_secret_value().split(","))
        entries += [{"name": f"key {i}", "key": key.strip()} for i, key in enumerate(keys)]
    if settings.api_keys_file is not None:
        entries += _entries(settings.api_keys_file.read_text(encoding="utf-8"))
    clients = [
        Client(
            str(entry.get("name", f"key {i}")),
            str(entry["key"]).encode(),
            TokenBucket(entry.get("requests_per_minute", settings.requests_per_minute)),
            TokenBucket(entry.get("tokens_per_minute", settings.tokens_per_minute)),
        )
        for i, entry in enumerate(entries)
    ]
    admin = settings.admin_key.get_secret_value() if settings.admin_key else None
    if settings.admin_key_file is not None:
        admin = settings.admin_key_file.read_text(encoding="utf-8").strip()
    return Clients(clients, admin.encode() if admin else None)


def _entries(text: str) -> list[Mapping[str, Any]]:
    import yaml

    entries = yaml.safe_load(text)
    known = {"name", "key", "requests_per_minute", "tokens_per_minute"}
    good = isinstance(entries, list) and entries and all(
        isinstance(entry, dict) and entry.get("key") and not set(entry) - known
        for entry in entries
    )  # fmt: skip
    if not good:
        raise UserError(
            "api_keys_file must hold a YAML list of {name, key, requests_per_minute, "
            "tokens_per_minute}: each entry needs at least a key. Correct the file."
        )
    return entries
