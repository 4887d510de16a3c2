"""What each honoured field of a request means, for /openapi.json and docs/reference/api-fields.md.

Numbers without an entry have the text of ``limits.LIMITS``. "Model.field" holds for that request model only.
"""

from __future__ import annotations

from typing import Any

from chorale.api.limits import LIMITS

# One line per field, to be read by column.
# fmt: off
DOCS = {
    "add_generation_prompt": "false only together with continue_final_message, as templates require",
    "allowed_token_ids": "the only tokens that may be sampled",
    "background": "answer at once with status `queued`, and run without a connection",
    "background_options": "checked only: every background response runs as soon as possible",
    "bad_words": "strings that must not appear in the output",
    "cache_salt": "requests with different salts do not share the prefix cache",
    "chat_template_kwargs": "`reasoning_effort`, `model_identity`, `builtin_tools`; others are unknown",
    "completion_request": "the completion that was rendered",
    "chat_request": "the chat that was rendered",
    "context_management": "when to summarize the conversation; one entry of type `compaction`",
    "continue_final_message": "the model continues the last message, which must be the assistant's",
    "conversation": "the conversation to continue, to which input and output are added",
    "detokenize": "false: no text is made, so stop strings, `text` and `derender` are a 400",
    "echo": "repeat the prompt before the completion",
    "function_call": "the predecessor of `tool_choice`",
    "functions": "the predecessor of `tools`",
    "generate_chunk": "with `stream`: one chunk of /inference/v1/generate, with at most one choice",
    "generate_response": "an answer of /inference/v1/generate in mode `tokens`",
    "generate_responses": "the answers for all prompts, in order",
    "guided_choice": "the older form of `structured_outputs.choice`",
    "guided_grammar": "the older form of `structured_outputs.grammar`",
    "guided_json": "the older form of `structured_outputs.json`",
    "guided_regex": "the older form of `structured_outputs.regex`",
    "ignore_eos": "continue after the model has ended its answer, up to the token limit",
    "include": "parts to add: `reasoning.encrypted_content`, `code_interpreter_call.outputs`, `metrics`, "
    "`message.output_text.logprobs`, `web_search_call.action.sources`; OpenAI's others have no effect",
    "include_reasoning": "false leaves the reasoning out of the answer; the model still reasons",
    "include_stop_str_in_output": "keep the stop string at the end of the text",
    "input": "a text, or a list of items: messages, reasoning, calls and their outputs",
    "instructions": "a developer message for this request only",
    "CompletionRequest.logprobs": "alternatives per token",
    "ChatRequest.logprobs": "return the log-probabilities of the answer's tokens",
    "CompletionRequest.max_tokens": "output tokens; 0 with echo scores the prompt",
    "messages": "the conversation so far",
    "metadata": "labels of a stored object",
    "modalities": 'only `["text"]`',
    "model": "a name in /v1/models",
    "ResponsesRequest.n": "only 1",
    "output_config": "`effort`, and `format`: a JSON Schema for the answer",
    "output_mode": "`tokens`; `text` adds the text; `derender` adds the message of a chat instead",
    "parse_context": "`tools`, `tool_choice`, `parallel_tool_calls` and `include_reasoning` of the chat",
    "parallel_tool_calls": "false ends the turn after the first call",
    "previous_response_id": "the stored response to continue",
    "prompt_token_ids": "the prompt, for each prompt of a completion",
    "prompt_tokens": "the length of the prompt, if not its ids, for each prompt of a completion",
    "logprob_token_ids": "tokens whose log-probabilities are returned, instead of the likeliest ones'",
    "include_record": "add `record` to the body or last event: all that `chorale verify` needs to repeat it",
    "prompt": "a text, token ids, or a list of either",
    "reasoning": "`effort`, and `summary`: any value returns the reasoning as a summary",
    "ChatRequest.reasoning": "`effort`, as reasoning_effort",
    "reasoning_effort": "`low`, `medium` or `high`; others act as the nearest of these",
    "reasoning_ended": "true: constraints apply from the first token, also to a prompt that begins a turn",
    "request_id": "the answer's id, after `generate-tokens-`",
    "request_ids": "the ids of the answers",
    "response_format": "the format of the answer: `text`, `json_object` or `json_schema`",
    "return_token_ids": "add `prompt_token_ids` and `token_ids` to the answer",
    "return_token_offsets": "/render adds where in the prompt's text each token begins and ends",
    "return_tokens_as_token_ids": "write tokens in log-probabilities as `token_id:123`",
    "return_weight_versions": "add `weight_versions` to each choice: which weights gave which tokens",
    "sampling_params": "vLLM's `SamplingParams`, see below",
    "skip_special_tokens": "leave special tokens out of the text",
    "stop": "one string or several that end the output",
    "stop_sequences": "strings that end the output",
    "stop_token_ids": "tokens that end the output",
    "store": "keep the result, which can then be read by its id",
    "stream": "send server-sent events",
    "DerenderChatRequest.stream": "the body has a chunk of a stream, and the answer is a chunk",
    "DerenderCompletionRequest.stream": "the body has a chunk of a stream, and the answer is a chunk",
    "stream_options": "`include_usage` and `continuous_usage_stats`; only with `stream`",
    "stream_state": "with `stream`: the `stream_state` of the answer to the chunk before",
    "ResponsesRequest.stream_options": "`include_obfuscation` pads each delta event to 64 bytes",
    "structured_outputs": "what the answer must match: `json`, `json_object`, `regex`, `choice` or `grammar`",
    "system": "the system prompt",
    "text": "`format`: the format of the answer: `text`, `json_object` or `json_schema`",
    "thinking": "whether thinking is part of the answer, and `budget_tokens`, its limit",
    "token_ids": "the prompt",
    "TokenSampling.logprobs": "alternatives per token",
    "tool_choice": "which tools the model may or must call",
    "tools": "functions and built-in tools that the model may call",
    "truncation": "for input longer than the window: `auto` drops the oldest items, `disabled` is a 400",
    "web_search_options": "offers the browser tool, as a tool of type `web_search` does",
}
# fmt: on


def described(schema: dict[str, Any], model: type) -> None:
    """Adds the descriptions to the JSON schema of a request model, as pydantic's ``json_schema_extra``."""
    for name, field in schema.get("properties", {}).items():
        text = DOCS.get(f"{model.__name__}.{name}") or DOCS.get(name)
        if text is None and name in LIMITS:
            text = LIMITS[name].doc
        if text is not None:
            field["description"] = text
