"""Fields of an upload, and the lifetime of files."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from chorale.api import limits
from chorale.api.fields import StrictModel, triage
from chorale.api.files.form import FILE, FormData
from chorale.api.http.body import parse_model
from chorale.errors import RequestError, invalid, unsupported

# Purposes of uploads, each with its meaning.
PURPOSES = {"batch": "the input of a batch", "user_data": "kept for the client; nothing reads it"}
# OpenAI's other purposes: refused for uploads, accepted as filters of the list.
KNOWN_PURPOSES = ("assistants", "batch_output", "evals", "fine-tune", "vision")


class ExpiresAfter(StrictModel):
    """Lifetime of a file."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, limits.number("expires_after.seconds")]


class UploadForm(StrictModel):
    """The form of an upload. ``file`` is for the OpenAPI schema only: the content is streamed."""

    purpose: str
    expires_after: ExpiresAfter | None = None
    file: str | None = Field(default=None, json_schema_extra={"format": "binary"})


def read_form(form: FormData) -> UploadForm:
    """Checks the fields of a form. Raises ``RequestError``."""
    data: dict[str, Any] = {}
    for name, value in form.fields.items():
        head, bracket, rest = name.partition("[")
        if bracket and head == "expires_after" and rest in ("anchor]", "seconds]"):
            nested = data.setdefault(head, {})
            if not isinstance(nested, dict):
                raise RequestError(f"the form contains {head!r} twice", param=head, code="invalid_form")
            nested[rest[:-1]] = int(value) if value.isascii() and value.isdigit() else value
        else:
            data[name] = value
    if form.size is None:
        raise RequestError("the form has no file", param=FILE, code="missing_required_parameter")
    fields = parse_model(UploadForm, triage(data, UploadForm.model_fields, {}, {}))
    check_purpose(fields.purpose)
    return fields


def check_purpose(purpose: str) -> None:
    if purpose in PURPOSES:
        return
    offered = ", ".join(PURPOSES)
    if purpose in KNOWN_PURPOSES:
        raise unsupported("purpose", f"{purpose!r} is not supported; choose one of {offered}")
    raise invalid("purpose", f"{purpose[:64]!r} is not one of {offered}")
