"""Errors of calls, in OpenAI's form."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A refusal with its status; clients of OpenAI repeat 408, 409, 429 and from 500 on."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def invalid(param: str, message: str) -> ApiError:
    """A parameter with a value that cannot be used."""
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


def unsupported(param: str, reason: str) -> ApiError:
    """A parameter, or a value of one, that this server does not serve."""
    return ApiError(400, f"{param} is not supported: {reason}", param=param, code="unsupported_parameter")
