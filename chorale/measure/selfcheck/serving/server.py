"""The private server that is checked: its process, log and client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from chorale.measure.selfcheck.check import Failed, Found, Plan
from chorale.requests.openai_client import AsyncClient, NoAnswerError, error_text
from chorale.serve.private_server import PrivateProcess

_LOG_SHOWN = 600  # characters shown from the end of a log


@dataclass(frozen=True, slots=True)
class Server:
    """The server that is checked. Methods raise ``Failed`` for an error response or none at all."""

    plan: Plan
    started: PrivateProcess
    client: AsyncClient
    model: str
    max_model_len: int

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Sends ``body`` with the model's name and returns the parsed response."""
        try:
            response = await self.client.post(path, {"model": self.model, **body})
        except NoAnswerError as error:
            raise Failed(f"{error.message}; {self.log_tail()}") from None
        if response.status_code != 200:
            raise Failed(f"{path}: {error_text(response)}")
        return response.json()

    async def choice(self, endpoint: str, **fields: Any) -> dict[str, Any]:
        """Returns the first choice of a completion or chat, with the prompt's token ids if requested."""
        found = await self.post(f"/v1/{endpoint}", fields)
        return {"prompt_token_ids": found.get("prompt_token_ids"), **found["choices"][0]}

    def log_tail(self) -> str:
        """Returns the end of the server's output."""
        return "its log ends: " + " | ".join(self.started.output()[-_LOG_SHOWN:].splitlines()[-6:])


ServerCheck = Callable[[Server], Awaitable[Found]]
