"""The decisions of the wire: where a field has no value, is it null or is the key absent?

Most are not ours to make: a field that a provider's type requires is always sent (null, if the type allows
it), and one that it may leave out but never sends as null is left out. ``facts`` reads that from the types.
What remains is here, and the test fails for a field that is in neither place:

* ``UNSET``: fields that may be absent and may be null; and fields that are not the provider's.
* ``EXCEPTIONS``: where an answer departs from the types, and why. One that never occurs fails the test, too.

Names are those of the provider's types, or the end of one (``McpCall.error`` stands for it in every list).
"""

from __future__ import annotations

NULL, ABSENT, AS_ASKED = "null", "absent", "as asked"

_EXAMPLE = "as in the provider's examples"
_OTHERS = "of a service that is not offered here"
_OPTIONAL = "readers that know no null here (the AI SDK among them) take its absence, and all others do too"
_VLLM = "as vLLM sends it"

# (provider, field): (state of a field without a value, why)
UNSET: dict[tuple[str, str], tuple[str, str]] = {
    # Chat Completions
    ("openai", "ChatCompletion.metadata"): (ABSENT, "stored completions have it, and always a value"),
    ("openai", "ChatCompletion.moderation"): (ABSENT, _OTHERS),
    ("openai", "ChatCompletionChunk.moderation"): (ABSENT, _OTHERS),
    ("openai", "ChatCompletionChunk.usage"): (
        AS_ASKED,
        "null with include_usage, absent without, as OpenAI says",
    ),
    ("openai", "ChatCompletionChunk.Choice.logprobs"): (NULL, _EXAMPLE),
    ("openai", "Delta.content"): (ABSENT, "a delta has what is new"),
    ("openai", "Delta.refusal"): (ABSENT, "a delta has what is new"),
    ("openai", "ChatCompletionMessage.audio"): (ABSENT, _OTHERS),
    ("openai", "ChatCompletionMessage.function_call"): (ABSENT, _EXAMPLE),
    ("openai", "ChatCompletionStoreMessage.audio"): (ABSENT, _OTHERS),
    ("openai", "ChatCompletionStoreMessage.content_parts"): (NULL, _EXAMPLE),
    ("openai", "ChatCompletionStoreMessage.function_call"): (ABSENT, _EXAMPLE),
    # the response
    ("openai", "Response.completed_at"): (NULL, "required by Open Responses"),
    ("openai", "Response.conversation"): (NULL, "in every answer of OpenAI"),
    ("openai", "Response.max_output_tokens"): (NULL, _EXAMPLE),
    ("openai", "Response.max_tool_calls"): (NULL, "required by Open Responses"),
    ("openai", "Response.moderation"): (ABSENT, _OTHERS),
    ("openai", "Response.previous_response_id"): (NULL, _EXAMPLE),
    ("openai", "Response.prompt"): (ABSENT, _OTHERS),
    ("openai", "Response.prompt_cache_key"): (NULL, "required by Open Responses"),
    ("openai", "Response.prompt_cache_retention"): (ABSENT, _OTHERS),
    ("openai", "Response.safety_identifier"): (NULL, "required by Open Responses"),
    ("openai", "ResponseError.type"): (ABSENT, "a failed response has code and message, " + _EXAMPLE),
    ("openai", "ResponseError.param"): (ABSENT, "a failed response has code and message, " + _EXAMPLE),
    ("openai", "Reasoning.context"): (ABSENT, "the answer echoes effort and summary"),
    ("openai", "Reasoning.generate_summary"): (ABSENT, "the older name of summary"),
    ("openai", "Reasoning.summary"): (NULL, _EXAMPLE),
    # items
    ("openai", "ResponseReasoningItem.encrypted_content"): (
        ABSENT,
        "Open Responses knows no null; " + _OPTIONAL,
    ),
    ("openai", "ResponseOutputMessage.phase"): (ABSENT, "Open Responses knows no null"),
    ("openai", "Message.phase"): (ABSENT, "Open Responses knows no null"),
    ("openai", "LocalShellCall.Action.timeout_ms"): (ABSENT, _OPTIONAL),
    ("openai", "LocalShellCall.Action.user"): (ABSENT, _OPTIONAL),
    ("openai", "LocalShellCall.Action.working_directory"): (ABSENT, _OPTIONAL),
    ("openai", "McpCall.approval_request_id"): (NULL, "as OpenAI's answers have it"),
    ("openai", "McpCall.error"): (NULL, "as OpenAI's answers have it"),
    ("openai", "McpCall.output"): (NULL, "as OpenAI's answers have it"),
    ("openai", "McpListTools.error"): (ABSENT, _OPTIONAL),
    ("openai", "McpListTools.Tool.annotations"): (ABSENT, _OPTIONAL),
    ("openai", "McpListTools.Tool.description"): (ABSENT, _OPTIONAL),
    ("openai", "McpApprovalResponse.reason"): (ABSENT, _OPTIONAL),
    ("openai", "ResponseApplyPatchToolCallOutput.output"): (ABSENT, _OPTIONAL),
    # tools, as the request declared them
    ("openai", "FunctionTool.description"): (NULL, "required by Open Responses"),
    ("openai", "FunctionTool.output_schema"): (ABSENT, _OTHERS),
    ("openai", "NamespaceTool.Function.output_schema"): (ABSENT, _OTHERS),
    ("openai", "FunctionShellTool.environment"): (AS_ASKED, "the request's own object"),
    ("openai", "CodeInterpreterToolAuto.memory_limit"): (AS_ASKED, "the request's own object"),
    ("openai", "Mcp.allowed_tools"): (AS_ASKED, "the request's own object"),
    ("openai", "Mcp.headers"): (AS_ASKED, "the request's own object"),
    ("openai", "Mcp.require_approval"): (AS_ASKED, "the request's own object"),
    ("openai", "ToolSearchTool.description"): (AS_ASKED, "the request's own object"),
    ("openai", "ToolSearchTool.parameters"): (AS_ASKED, "the request's own object"),
    ("openai", "WebSearchTool.filters"): (AS_ASKED, "the request's own object"),
    ("openai", "WebSearchTool.user_location"): (AS_ASKED, "the request's own object"),
    ("openai", "allowed_callers"): (ABSENT, "every call is the model's own"),
    ("openai", "caller"): (ABSENT, "every call is the model's own"),
    ("openai", "Model.shutdown_date"): (ABSENT, _OTHERS),
    # not OpenAI's
    ("openai", "ChatCompletion.Choice.stop_reason"): (NULL, _VLLM),
    ("openai", "ChatCompletionChunk.Choice.stop_reason"): (NULL, _VLLM),
    ("openai", "CompletionChoice.stop_reason"): (NULL, _VLLM),
    ("openai", "ChatCompletionMessage.reasoning"): (NULL, _VLLM),
    ("openai", "ChatCompletionMessage.reasoning_content"): (NULL, _VLLM),
    ("openai", "Model.parent"): (NULL, _VLLM),
    ("openai", "ChatCompletion.response_format"): (NULL, "a stored completion, " + _EXAMPLE),
    ("openai", "ChatCompletion.seed"): (NULL, "a stored completion, " + _EXAMPLE),
    ("openai", "ChatCompletion.temperature"): (NULL, "a stored completion, " + _EXAMPLE),
    ("openai", "ChatCompletion.tool_choice"): (NULL, "a stored completion, " + _EXAMPLE),
    ("openai", "ChatCompletion.tools"): (NULL, "a stored completion, " + _EXAMPLE),
    ("openai", "ChatCompletion.top_p"): (NULL, "a stored completion, " + _EXAMPLE),
    ("openai", "ChatCompletion.presence_penalty"): (NULL, "a stored completion, " + _EXAMPLE),
    ("openai", "ChatCompletion.frequency_penalty"): (NULL, "a stored completion, " + _EXAMPLE),
    ("open_responses", "ResponseResource.conversation"): (NULL, "OpenAI's"),
    ("open_responses", "ResponseResource.user"): (NULL, "OpenAI's"),
    # Messages
    ("anthropic", "ToolUseBlock.toolset_name"): (ABSENT, _OTHERS),
}

_UNNAMED = "Anthropic's examples have no such key where there is nothing to say"
_OLDER = "OpenAI's earlier types have it"
_STORED = "what the request asked for: OpenAI's example of a stored completion has it, its type does not"
_CHUNK = "a chunk of a stream, which has the type of the body: null until the end, as OpenAI says"

# (provider, field, what the types say against it): why it is so
EXCEPTIONS: dict[tuple[str, str, str], str] = {
    # Chat Completions and Completions
    ("openai", "ChatCompletion.prompt_token_ids", "unknown"): "asked for with return_token_ids (vLLM's)",
    ("openai", "ChatCompletionChunk.prompt_token_ids", "unknown"): "asked for with return_token_ids (vLLM's)",
    ("openai", "CompletionChoice.prompt_token_ids", "unknown"): "asked for with return_token_ids (vLLM's)",
    ("openai", "Choice.token_ids", "unknown"): "asked for with return_token_ids (vLLM's)",
    ("openai", "CompletionChoice.token_ids", "unknown"): "asked for with return_token_ids (vLLM's)",
    ("openai", "Choice.stop_reason", "unknown"): "vLLM's",
    ("openai", "CompletionChoice.stop_reason", "unknown"): "vLLM's",
    ("openai", "ChatCompletionMessage.reasoning", "unknown"): "reasoning: OpenRouter's and vLLM's name",
    ("openai", "ChatCompletionMessage.reasoning_content", "unknown"): "reasoning: DeepSeek's name",
    ("openai", "Delta.reasoning", "unknown"): "reasoning: OpenRouter's and vLLM's name",
    ("openai", "Delta.reasoning_content", "unknown"): "reasoning: DeepSeek's name",
    (
        "openai",
        "Delta.annotations",
        "unknown",
    ): "OpenAI streams them so; the type has them in the message only",
    ("openai", "ChatCompletionMessage.builtin_tool_calls", "unknown"): "ours (docs/api.md)",
    ("openai", "Delta.builtin_tool_calls", "unknown"): "ours (docs/api.md)",
    ("openai", "ChatCompletion.response_format", "unknown"): _STORED,
    ("openai", "ChatCompletion.seed", "unknown"): _STORED,
    ("openai", "ChatCompletion.temperature", "unknown"): _STORED,
    ("openai", "ChatCompletion.tool_choice", "unknown"): _STORED,
    ("openai", "ChatCompletion.tools", "unknown"): _STORED,
    ("openai", "ChatCompletion.top_p", "unknown"): _STORED,
    ("openai", "ChatCompletion.presence_penalty", "unknown"): _STORED,
    ("openai", "ChatCompletion.frequency_penalty", "unknown"): _STORED,
    (
        "openai",
        "ChatCompletionStoreMessage.role",
        "not a str",
    ): "messages of the user, as in OpenAI's example",
    (
        "openai",
        "ChatCompletionStoreMessage.refusal",
        "missing",
    ): "messages of the user, as in OpenAI's example",
    ("openai", "Completion.usage", "null"): _CHUNK,
    ("openai", "CompletionChoice.finish_reason", "null"): _CHUNK,
    ("openai", "CompletionChoice.Logprobs.token_logprobs", "null"): "with echo the first token has none",
    ("openai", "CompletionChoice.Logprobs.top_logprobs", "null"): "with echo the first token has none",
    # Responses
    ("openai", "Response.output_text", "missing"): "the SDK makes it of the output",
    ("openai", "Response.access_programs", "missing"): "of OpenAI accounts",
    (
        "openai",
        "Response.usage",
        "null",
    ): "until the end: OpenAI's examples have null, Open Responses requires the key",
    ("openai", "Response.user", "null"): "OpenAI's examples have null",
    ("openai", "Response.frequency_penalty", "unknown"): "required by Open Responses",
    ("openai", "Response.presence_penalty", "unknown"): "required by Open Responses",
    ("openai", "Response.store", "unknown"): "required by Open Responses",
    ("openai", "ResponseFormatTextJSONSchemaConfig.description", "null"): "required by Open Responses",
    ("openai", "ResponseCustomToolCall.status", "unknown"): "the type of the same item in lists has it",
    ("openai", "ResponseCustomToolCallOutput.status", "unknown"): "the type of the same item in lists has it",
    (
        "openai",
        "LocalShellCallOutput.call_id",
        "unknown",
    ): "every other output has it; OpenAI has it in the id",
    ("openai", "ResponseFunctionWebSearch.results", "unknown"): "asked for with include",
    ("openai", "ResponseFunctionCallArgumentsDoneEvent.name", "unknown"): _OLDER,
    ("openai", "ResponseTextDeltaEvent.obfuscation", "unknown"): "asked for with include_obfuscation",
    (
        "openai",
        "ResponseReasoningTextDeltaEvent.obfuscation",
        "unknown",
    ): "asked for with include_obfuscation",
    (
        "openai",
        "ResponseReasoningSummaryTextDeltaEvent.obfuscation",
        "unknown",
    ): "asked for with include_obfuscation",
    ("openai", "Logprob.bytes", "unknown"): "required by Open Responses, and in the item's type",
    ("openai", "TopLogprob.bytes", "unknown"): "required by Open Responses, and in the item's type",
    ("openai", "CompactedResponse.output", "no type message"): "the user's messages, as in OpenAI's example",
    ("openai", "ConversationItemList.first_id", "null"): "an empty list has no first item",
    ("openai", "ConversationItemList.last_id", "null"): "an empty list has no last item",
    ("openai", "Model.max_model_len", "unknown"): "vLLM's",
    ("openai", "Model.parent", "unknown"): "vLLM's",
    ("openai", "Model.permission", "unknown"): "vLLM's",
    ("openai", "Model.root", "unknown"): "vLLM's",
    # Open Responses
    ("open_responses", "ResponseResource.conversation", "unknown"): "OpenAI's",
    ("open_responses", "ResponseResource.user", "unknown"): "OpenAI's",
    ("open_responses", "ReasoningBody.status", "unknown"): "OpenAI's",
    ("open_responses", "FunctionCall.namespace", "unknown"): "OpenAI's",
    ("open_responses", "InputTokensDetails.cache_write_tokens", "unknown"): "OpenAI's",
    ("open_responses", "ResponseFunctionCallArgumentsDoneEvent.name", "unknown"): "OpenAI's",
    (
        "open_responses",
        "JsonSchemaResponseFormat.schema",
        "not a dict",
    ): "published as null only, so that no schema could be echoed; OpenAI echoes it",
    # Messages
    ("anthropic", "TextBlock.citations", "missing"): _UNNAMED,
    ("anthropic", "Message.container", "missing"): _UNNAMED,
    ("anthropic", "Message.diagnostics", "missing"): _UNNAMED,
    ("anthropic", "Message.stop_details", "missing"): _UNNAMED,
    ("anthropic", "Delta.container", "missing"): _UNNAMED,
    ("anthropic", "Delta.stop_details", "missing"): _UNNAMED,
    ("anthropic", "Usage.cache_creation", "missing"): _UNNAMED,
    ("anthropic", "Usage.inference_geo", "missing"): _UNNAMED,
    ("anthropic", "Usage.server_tool_use", "missing"): _UNNAMED,
    ("anthropic", "Usage.speed", "missing"): _UNNAMED,
    ("anthropic", "MessageDeltaUsage.server_tool_use", "missing"): _UNNAMED,
    ("anthropic", "RawMessageStreamEvent.", "no type ping"): "documented, but not in the type",
    ("anthropic", "RawMessageStreamEvent.", "no type error"): "documented, but not in the type",
}

# Types of items, tools and events that Open Responses does not publish. A client gets them only if it asked
# for the tool; they have OpenAI's form.
BEYOND_OPEN_RESPONSES = (
    "apply_patch", "code_interpreter", "compaction.compacting", "custom", "local_shell", "mcp", "namespace",
    "shell", "tool_search", "web_search",
)  # fmt: skip


def find_unset(provider: str, name: str) -> tuple[str, str] | None:
    """The row whose field is ``name`` or its end."""
    rows = [row for (of, end), row in UNSET.items() if of == provider and is_end(name, end)]
    return rows[0] if rows else None


def find_exception(provider: str, name: str, what: str) -> tuple[str, str, str] | None:
    """The key of the exception that allows it. The longest end decides."""
    keys = [key for key in EXCEPTIONS if key[0] == provider and is_end(name, key[1]) and key[2] == what]
    return max(keys, key=lambda key: len(key[1]), default=None)


def is_beyond(provider: str, what: str) -> bool:
    kind = what.removeprefix("no type ").removeprefix("response.")
    return provider == "open_responses" and what != kind and kind.startswith(BEYOND_OPEN_RESPONSES)


def is_end(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")
