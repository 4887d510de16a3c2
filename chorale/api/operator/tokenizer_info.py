"""/tokenizer_info, enabled by --enable-tokenizer-info-endpoint as in vLLM, for clients that tokenize
themselves.

The fields are those of a tokenizer_config.json. ``chat_template`` is generated and covers text-only chats; a
test compares its output with the renderer's.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chorale.api.http.responses import json_response
from chorale.api.state import ServerState
from chorale.harmony.render import render_conversation
from chorale.harmony.vocab import SPECIAL_NAMES
from chorale.requests.prompt import system_message

_START = "<|start|>assistant"  # the generation prompt


def routes(state: ServerState) -> list[Route]:
    """Returns the route, if the operator has enabled it."""
    return [Route("/tokenizer_info", partial(tokenizer_info, state))] if state.config.tokenizer_info else []


async def tokenizer_info(state: ServerState, request: Request) -> Response:
    special = {"special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    body: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|startoftext|>",
        "eos_token": "<|return|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": state.client.info.max_model_len,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(token_id): {"content": name, **special} for token_id, name in SPECIAL_NAMES.items()
        },
        "chat_template": chat_template(state),
    }
    return json_response(body)


def chat_template(state: ServerState) -> str:
    """Returns a Jinja template that renders a text-only chat like ``render_conversation``."""
    system = system_message(state.config, state.config.default_reasoning_effort)
    head = state.vocab.decode(render_conversation([system], state.vocab))
    return _TEMPLATE.replace("HEAD", json.dumps(head.removesuffix(_START), ensure_ascii=False))


_TEMPLATE = """\
{{- HEAD -}}
{%- set ns = namespace(said=[]) -%}
{%- for message in messages -%}
{%- if message.role in ("system", "developer") and ns.said is not none -%}
{%- set ns.said = ns.said + [message.content] -%}
{%- else -%}
{%- if ns.said -%}
{{- "<|start|>developer<|message|># Instructions\\n\\n" + ns.said | join("\\n\\n") + "<|end|>" -}}
{%- endif -%}
{%- set ns.said = none -%}
{%- if message.role in ("system", "developer") -%}
{{- "<|start|>developer<|message|># Instructions\\n\\n" + message.content + "<|end|>" -}}
{%- elif message.role == "assistant" -%}
{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" -}}
{%- elif message.role == "user" -%}
{{- "<|start|>user<|message|>" + message.content + "<|end|>" -}}
{%- else -%}
{{- raise_exception("only text messages are supported; use /v1/chat/completions") -}}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if ns.said -%}
{{- "<|start|>developer<|message|># Instructions\\n\\n" + ns.said | join("\\n\\n") + "<|end|>" -}}
{%- endif -%}
{%- if add_generation_prompt -%}
{{- "<|start|>assistant" -}}
{%- endif -%}
"""
