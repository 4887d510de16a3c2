"""Inputs of the fuzzer: good requests of every kind, and bad values to put into them."""

from __future__ import annotations

from typing import Any

from tests.support.wire.responses_scenarios import ITEMS

_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_FUNCTION = {"name": "f", "description": "F.", "parameters": _SCHEMA, "strict": True}
_USER = {"role": "user", "content": "hi"}
_PARTS = [{"type": "text", "text": "hi"}, {"type": "input_text", "text": "there"}]
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_CUSTOM_CALL = {"id": "c2", "type": "custom", "custom": {"name": "note", "input": "x"}}
_GRAMMAR = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}

_CHAT_HISTORY = [
    {"role": "system", "content": "Be brief."},
    _USER,
    {"role": "assistant", "content": "Wait.", "reasoning": "T.", "tool_calls": [_CALL, _CUSTOM_CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": _PARTS},
    {"role": "tool", "tool_call_id": "c2", "content": "ok"},
    {"role": "user", "name": "ann", "content": _PARTS},
]
_CHAT_TOOLS = [
    {"type": "function", "function": _FUNCTION},
    {"type": "custom", "custom": {"name": "note", "format": {"type": "text"}}},
]
_ITEMS = [*ITEMS, {"role": "user", "content": "and?"}]
_RESPONSE_TOOLS = [
    {"type": "function", **_FUNCTION},
    {"type": "custom", "name": "note", "format": _GRAMMAR},
    {"type": "local_shell"},
    {"type": "shell", "environment": {"type": "local"}},
    {"type": "apply_patch"},
    {"type": "namespace", "name": "ns", "description": "N.", "tools": [{"type": "function", **_FUNCTION}]},
    {"type": "tool_search", "execution": "client"},
    {"type": "image_generation"},
]
_BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "T.", "signature": "cho1.AQI="},
            {"type": "text", "text": "Wait."},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "1"}]},
            {
                "type": "document",
                "title": "D",
                "source": {"type": "text", "media_type": "text/plain", "data": "x"},
            },
        ],
    },
]
_MESSAGE_TOOLS = [
    {"name": "f", "description": "F.", "input_schema": _SCHEMA},
    {"type": "bash_20250124", "name": "bash"},
]
_SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 1,
    "stop": ["x"],
    "logit_bias": {"5": 1.5},
    "min_p": 0.1,
    "top_k": 5,
    "presence_penalty": 0.1,
    "bad_words": ["bad"],
    "priority": 1,
    "cache_salt": "s",
    "stop_token_ids": [5],
}

SEEDS: list[tuple[str, Any]] = [
    ("/v1/chat/completions", {"messages": [_USER], **_SAMPLING, "min_tokens": 1, "n": 2}),
    (
        "/v1/chat/completions",
        {
            "messages": _CHAT_HISTORY,
            "tools": _CHAT_TOOLS,
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_token_ids": True,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [_USER],
            "tools": _CHAT_TOOLS,
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": _CHAT_TOOLS}},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [_USER],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}},
            "reasoning_effort": "low",
            "thinking_token_budget": 20,
            "logprobs": True,
            "top_logprobs": 2,
            "chat_template_kwargs": {"model_identity": "me"},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [_USER, {"role": "assistant", "content": "Well,"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
            "functions": [],
            "web_search_options": None,
            "structured_outputs": None,
            "modalities": ["text"],
        },
    ),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 5, "logprobs": 1, "echo": True, **_SAMPLING}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "n": 2, "stream": True, "return_token_ids": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "structured_outputs": {"choice": ["a", "b"]}}),
    ("/v1/responses", {"input": _ITEMS, "tools": _RESPONSE_TOOLS, "tool_choice": "auto", "stream": True}),
    ("/v1/responses", {"input": "hi", "tools": _RESPONSE_TOOLS, "tool_choice": {"type": "shell"}}),
    (
        "/v1/responses",
        {
            "input": "hi",
            "instructions": "Be brief.",
            "text": {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}, "verbosity": "low"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
            "top_logprobs": 2,
            "metadata": {"a": "b"},
            "store": False,
            "truncation": "auto",
            "max_output_tokens": 50,
            "max_tool_calls": 2,
            "user": "u",
        },
    ),
    ("/v1/responses", {"input": "hi", "background": True, "store": True}),
    ("/v1/responses", {"input": "hi", "background": True, "stream": True}),
    ("/v1/responses", {"input": "hi", "conversation": {"id": "conv_" + "0" * 32}}),
    ("/v1/responses", {"input": "hi", "previous_response_id": "resp_" + "0" * 32}),
    (
        "/v1/responses",
        {"input": [{"type": "item_reference", "id": "msg_" + "0" * 32}], "tool_choice": "none"},
    ),
    ("/v1/responses/input_tokens", {"input": _ITEMS, "tools": _RESPONSE_TOOLS}),
    ("/v1/conversations", {"items": _ITEMS[:3], "metadata": {"a": "b"}}),
    (
        "/v1/messages",
        {
            "model": "demo",
            "max_tokens": 100,
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": _BLOCKS,
            "tools": _MESSAGE_TOOLS,
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
            "stop_sequences": ["x"],
            "stream": True,
        },
    ),
    (
        "/v1/messages",
        {
            "model": "demo",
            "max_tokens": 100,
            "messages": [_USER, {"role": "assistant", "content": "Well,"}],
            "metadata": {"user_id": "u"},
            "output_config": {"effort": "low"},
        },
    ),
    ("/v1/messages/count_tokens", {"messages": _BLOCKS, "tools": _MESSAGE_TOOLS, "system": "Be brief."}),
    ("/tokenize", {"messages": _CHAT_HISTORY, "tools": _CHAT_TOOLS, "return_token_strs": True}),
    ("/tokenize", {"prompt": "hi"}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]

POOL: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 0.5, -1e308, float("nan"), float("inf")),
    *("", "x", "auto", "\x00", "\ud800", "\u202e\U0001f600", "<|end|><|start|>system", "{" * 70, "x" * 5000),
    *([], [[]], [None], {}, {"": ""}, {"$ref": "#"}, {"pattern": "(?=a)"}, {"id": "x", "name": 5}),
    *({"type": None}, {"type": []}, {"type": {}}, {"type": "function"}, {"type": "object", "properties": []}),
    {"role": "user", "content": 5},
]
