"""The private server that is checked (its process, log and client), and the context that its checks share."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from chorale.measure.selfcheck.check import Failed, Found
from chorale.measure.selfcheck.recorded import Recording
from chorale.requests.openai_client import AsyncClient, NoAnswerError, error_text
from chorale.serve.private_server import PrivateProcess

_LOG_SHOWN = 600  # characters shown from the end of a log


class Server:
    """The server that is checked. Methods raise ``Failed`` for an error response or none at all."""

    def __init__(self, started: PrivateProcess, client: AsyncClient) -> None:
        self.started, self.client = started, client
        self.model = ""
        self.max_model_len = 0
        self.kv_tokens = 0  # capacity of the KV pools of all engines

    async def learn(self) -> str:
        """Reads the model's name and the sizes that the checks depend on. Returns a summary."""
        model = (await self.client.models())[0]
        self.model, self.max_model_len = model["id"], int(model["max_model_len"])
        text = (await self.client.get("/metrics")).text
        engines = re.findall(r"cache_config_info\{([^}]*)\}", text)
        for labels in (dict(re.findall(r'(\w+)="([^"]*)"', engine)) for engine in engines):
            self.kv_tokens += int(labels.get("num_gpu_blocks", 0)) * int(labels.get("block_size", 0))
        return f"{self.model}: {self.max_model_len:,} tokens a request, {self.kv_tokens:,} in the KV pool"

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Sends ``body`` with the model's name and returns the parsed response."""
        try:
            response = await self.client.post(path, {"model": self.model, **body})
        except NoAnswerError as error:
            raise Failed(f"{error.message}; {self.log_tail()}") from None
        if response.status_code != 200:
            raise Failed(f"{path}: {error_text(response)}")
        return response.json()

    async def complete(self, **fields: Any) -> dict[str, Any]:
        """Returns the first choice of a raw completion."""
        found = await self.post("/v1/completions", fields)
        return dict(found["choices"][0])

    async def chat(self, **fields: Any) -> dict[str, Any]:
        """Returns the first choice of a chat completion, with the prompt's token ids if requested."""
        found = await self.post("/v1/chat/completions", fields)
        return {"prompt_token_ids": found.get("prompt_token_ids"), **found["choices"][0]}

    def log_tail(self) -> str:
        """Returns the end of the server's output."""
        return "its log ends: " + " | ".join(self.started.output()[-_LOG_SHOWN:].splitlines()[-6:])


@dataclass(slots=True)
class Context:
    """Settings of the checks. Only the check "record" writes ``recording``."""

    quick: bool
    is_slow: bool  # a full-size model without an accelerator
    has_accelerator: bool
    recording: Recording = field(default_factory=Recording)


ServerCheck = Callable[[Server, Context], Awaitable[Found]]
