"""Every error Chorale raises on purpose, each with its one HTTP answer.

    ChoraleError                       500 server_error
    ├── ConfigError                    refused at start (exit code 2), never over HTTP
    │   ├── ModelConfigError           config.json: names the key
    │   └── CheckpointError            weights: names the file and the tensor
    ├── RequestError                   400 invalid_request_error
    │   ├── ContextLengthError         400 context_length_exceeded
    │   ├── AuthenticationError        401 invalid_api_key
    │   ├── PermissionDeniedError      403
    │   ├── NotFoundError              404 not_found
    │   │   └── ModelNotFoundError     404 model_not_found
    │   ├── MethodNotAllowedError      405
    │   ├── RequestTimeoutError        408
    │   ├── ConflictError              409
    │   ├── PayloadTooLargeError       413
    │   ├── UnsupportedMediaTypeError  415
    │   ├── ExpectationError           417
    │   ├── UpgradeRequiredError       426
    │   ├── HeadersTooLargeError       431
    │   └── QueueFullError             429 rate_limit_exceeded, with Retry-After
    └── EngineError                    500 engine_error
        ├── EngineLoadingError         503 engine_loading, with Retry-After
        └── EngineDeadError            503 engine_restarted, with Retry-After

A deterministic fault of the request is never a 5xx: OpenAI clients retry those.
Source of the wire form: ``{"error": {"message", "type", "param", "code"}}`` with a string ``code``.
"""

from __future__ import annotations

from typing import Any, ClassVar


class ChoraleError(Exception):
    """Root of the tree. ``status``, ``type`` and ``code`` are the class's HTTP answer."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code
        self.retry_after = retry_after  # seconds, rounded up when it becomes a header

    def to_dict(self) -> dict[str, Any]:
        """The OpenAI error object (the value under ``"error"``)."""
        return {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }


class ConfigError(ChoraleError):
    """The operator asked for something that cannot run. Raised before serving starts."""

    default_code = "config_error"


class ModelConfigError(ConfigError):
    """``config.json`` is not a gpt-oss configuration we can run; the message names the key."""


class CheckpointError(ConfigError):
    """A weight file is missing, truncated, or holds the wrong tensors; names file and tensor."""


class RequestError(ChoraleError):
    status = 400
    type = "invalid_request_error"
    default_code = "invalid_value"


class ContextLengthError(RequestError):
    default_code = "context_length_exceeded"


class AuthenticationError(RequestError):
    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class PermissionDeniedError(RequestError):
    status = 403
    type = "permission_error"
    default_code = "permission_denied"


class NotFoundError(RequestError):
    status = 404
    default_code = "not_found"


class ModelNotFoundError(NotFoundError):
    default_code = "model_not_found"


class MethodNotAllowedError(RequestError):
    status = 405
    default_code = "method_not_allowed"


class RequestTimeoutError(RequestError):
    status = 408
    default_code = "request_timeout"


class ConflictError(RequestError):
    status = 409
    default_code = "conflict"


class PayloadTooLargeError(RequestError):
    status = 413
    default_code = "payload_too_large"


class UnsupportedMediaTypeError(RequestError):
    status = 415
    default_code = "unsupported_media_type"


class ExpectationError(RequestError):
    status = 417
    default_code = "unsupported_expectation"


class UpgradeRequiredError(RequestError):
    status = 426
    default_code = "upgrade_required"


class HeadersTooLargeError(RequestError):
    status = 431
    default_code = "headers_too_large"


class QueueFullError(RequestError):
    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"


class EngineError(ChoraleError):
    default_code = "engine_error"


class EngineLoadingError(EngineError):
    status = 503
    type = "service_unavailable"
    default_code = "engine_loading"


class EngineDeadError(EngineError):
    status = 503
    type = "service_unavailable"
    default_code = "engine_restarted"


def invalid(param: str, message: str) -> RequestError:
    """The value of a request's field is wrong."""
    return RequestError(f"{param}: {message}", param=param)


def unsupported(param: str, message: str) -> RequestError:
    """The value of a request's field is known, and cannot be honoured here."""
    return RequestError(f"{param}: {message}", param=param, code="unsupported_value")
