"""What goes wrong with a request, as OpenAI's interface tells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: what is wrong and what to do.
        param: the field of the request that it is about.
        code: a word that programs can compare.
        headers: further ones, such as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """What is sent."""
        return error_body(self.status, self.message, self.param, self.code)


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The JSON of an error."""
    kinds = {
        401: "authentication_error", 403: "permission_error", 404: "not_found_error",
        408: "timeout_error", 429: "rate_limit_error", 503: "unavailable_error",
        504: "timeout_error",
    }  # fmt: skip
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
