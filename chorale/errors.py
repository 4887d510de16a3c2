"""Every error Chorale raises on purpose, each with its one HTTP answer.

``ConfigError`` ends the start (exit code 2) and is never sent over HTTP. ``RequestError`` is the client's
fault, ``EngineError`` the server's. ``QueueFullError`` and the errors with status 503 carry Retry-After.

A deterministic fault of the request is never a 5xx: OpenAI clients retry those.
Source of the wire form: ``{"error": {"message", "type", "param", "code"}}`` with a string ``code``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar


def install_hint(extra: str = "") -> str:
    """Returns how to install Chorale, or one of its extras: the only text that says so.

    Not by name: the name "chorale" in the Python package index belongs to another project.
    """
    chosen = f"[{extra}]" if extra else ""
    source = f"'.{chosen}'" if extra else "."
    # Without -e, pip would replace an installation that uses the checkout, such as that of "make serve".
    edit = "-e " if (Path(__file__).parents[1] / "pyproject.toml").exists() else ""
    return f"pip install {edit}{source} in a checkout of Chorale, or its wheel as 'FILE.whl{chosen}'"


def evals_hint() -> str:
    """Returns how to install chorale-evals, which is not published either."""
    return "pip install ./evals in a checkout of Chorale"


class ChoraleError(Exception):
    """Root of the tree. ``status``, ``type`` and ``code`` are the class's HTTP answer."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = "internal_error"

    def __init_subclass__(
        cls, *, status: int | None = None, type: str | None = None, code: str | None = None
    ) -> None:
        """The keywords of a class statement replace the parent's values."""
        cls.status = cls.status if status is None else status
        cls.type = cls.type if type is None else type
        cls.default_code = cls.default_code if code is None else code

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None,
        retry_after: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code
        self.retry_after = retry_after  # seconds, rounded up when it becomes a header

    def to_dict(self) -> dict[str, Any]:
        """The OpenAI error object (the value under ``"error"``)."""
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}


class ConfigError(ChoraleError, code="config_error"):
    """The operator asked for something that cannot run. Raised before serving starts."""


class ModelConfigError(ConfigError):
    """``config.json`` is not a gpt-oss configuration we can run; the message names the key."""


class CheckpointError(ConfigError):
    """A weight file is missing, truncated, or holds the wrong tensors; names file and tensor."""


class AdapterError(CheckpointError, status=400, type="invalid_request_error", code="invalid_adapter"):
    """A LoRA adapter cannot be used with this model. Loading one at run time answers with it."""


# fmt: off
class RequestError(ChoraleError, status=400, type="invalid_request_error", code="invalid_value"): ...
class ContextLengthError(RequestError, code="context_length_exceeded"): ...
class AuthenticationError(RequestError, status=401, type="authentication_error", code="invalid_api_key"): ...
class PermissionDeniedError(RequestError, status=403, type="permission_error", code="permission_denied"): ...
class NotFoundError(RequestError, status=404, code="not_found"): ...
class ModelNotFoundError(NotFoundError, code="model_not_found"): ...
class MethodNotAllowedError(RequestError, status=405, code="method_not_allowed"): ...
class RequestTimeoutError(RequestError, status=408, code="request_timeout"): ...
class ConflictError(RequestError, status=409, code="conflict"): ...
class PayloadTooLargeError(RequestError, status=413, code="payload_too_large"): ...
class UnsupportedMediaTypeError(RequestError, status=415, code="unsupported_media_type"): ...
class ExpectationError(RequestError, status=417, code="unsupported_expectation"): ...
class UpgradeRequiredError(RequestError, status=426, code="upgrade_required"): ...
class QueueFullError(RequestError, status=429, type="rate_limit_error", code="rate_limit_exceeded"): ...
class OverloadedError(QueueFullError, status=503, type="service_unavailable", code="max_num_queued_reqs"): ...
class HeadersTooLargeError(RequestError, status=431, code="headers_too_large"): ...
class EngineError(ChoraleError, code="engine_error"): ...
class GpuError(EngineError): ...  # its hardware failed: a new process may fail again
class EngineLoadingError(EngineError, status=503, type="service_unavailable", code="engine_loading"): ...
class EnginePausedError(EngineError, status=503, type="service_unavailable", code="engine_paused"): ...
class EngineDeadError(EngineError, status=503, type="service_unavailable", code="engine_restarted"): ...
# fmt: on


def invalid(param: str, message: str) -> RequestError:
    """The value of a request's field is wrong."""
    return RequestError(f"{param}: {message}", param=param)


def unsupported(param: str, message: str) -> RequestError:
    """The value of a request's field is known, and cannot be honoured here."""
    return RequestError(f"{param}: {message}", param=param, code="unsupported_value")


def unsupported_content(path: str, message: str) -> RequestError:
    """The content at ``path`` has a type that the model cannot take."""
    return RequestError(f"{path}: {message}", param=f"{path}.type", code="unsupported_content_type")
