"""Body of POST /v1/batches."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from chorale.api import limits
from chorale.api.fields import Metadata, StrictModel
from chorale.api.files.request import ExpiresAfter
from chorale.errors import invalid

_WINDOW = re.compile(r"([1-9][0-9]{0,2})([hd])")
_HOURS = {"h": 1, "d": 24}
_MOST_HOURS = 30 * 24


class CreateBatch(StrictModel):
    """``completion_window``: 24h in OpenAI's API; here up to 720h or 30d."""

    input_file_id: Annotated[str, limits.items("identifier")]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Annotated[str, Field(pattern=rf"^{_WINDOW.pattern}$")]
    metadata: Annotated[Metadata, limits.items("metadata")] | None = None
    output_expires_after: ExpiresAfter | None = None

    @property
    def seconds(self) -> float:
        """Returns the completion window in seconds. Raises ``RequestError``."""
        found = _WINDOW.fullmatch(self.completion_window)
        hours = int(found[1]) * _HOURS[found[2]] if found is not None else 0
        if not 1 <= hours <= _MOST_HOURS:
            raise invalid("completion_window", "must be 1h to 720h, or 1d to 30d")
        return hours * 3600.0
