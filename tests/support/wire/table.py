"""Decides for each field of an answer: without a value, is it null or is the key absent?

The providers' types decide most cases: a required field is always sent (as null, if the type allows it), and
a field that may be absent but not null is left out. ``facts`` reads that from the types. This module decides
the others, and the test fails for a field that neither decides:

* ``UNSET``: fields that may be both absent and null, and fields that the provider does not have.
* ``EXCEPTIONS``: deviations of an answer from the types, with reasons. One that never occurs fails the test.

Names are those of the provider's types, or the end of one (``McpCall.error`` matches it in every list).
"""

from __future__ import annotations

NULL, ABSENT, AS_ASKED = "null", "absent", "as asked"

_EXAMPLE = "as in the provider's examples"
_OTHERS = "of a service that is not offered here"
_OPTIONAL = "readers that know no null here (the AI SDK among them) take its absence, and all others do too"
_VLLM = "as vLLM sends it"

_UNNAMED = "Anthropic's examples have no such key where there is nothing to say"
_OLDER = "OpenAI's earlier types have it"
_STORED = "what the request asked for: OpenAI's example of a stored completion has it, its type does not"
_CHUNK = "a chunk of a stream, which has the type of the body: null until the end, as OpenAI says"

# (provider, state of a field without a value, reason) -> fields
_UNSET: dict[tuple[str, str, str], str] = {
    ("openai", ABSENT, "stored completions have it, and always a value"): "ChatCompletion.metadata",
    ("openai", ABSENT, _OTHERS): """
        ChatCompletion.moderation ChatCompletionChunk.moderation ChatCompletionMessage.audio
        ChatCompletionStoreMessage.audio Response.moderation Response.prompt
        Response.prompt_cache_retention FunctionTool.output_schema
        NamespaceTool.Function.output_schema Model.shutdown_date
    """,
    ("openai", AS_ASKED, "null with include_usage, absent without, as OpenAI says"): """
        ChatCompletionChunk.usage
    """,
    ("openai", NULL, _EXAMPLE): """
        ChatCompletionChunk.Choice.logprobs ChatCompletionStoreMessage.content_parts
        Response.max_output_tokens Response.previous_response_id Reasoning.summary
    """,
    ("openai", ABSENT, "a delta has what is new"): "Delta.content Delta.refusal",
    ("openai", ABSENT, _EXAMPLE): """
        ChatCompletionMessage.function_call ChatCompletionStoreMessage.function_call
    """,
    ("openai", NULL, "required by Open Responses"): """
        Response.completed_at Response.max_tool_calls Response.prompt_cache_key
        Response.safety_identifier FunctionTool.description
    """,
    ("openai", NULL, "in every answer of OpenAI"): "Response.conversation",
    ("openai", ABSENT, "a failed response has code and message, " + _EXAMPLE): """
        ResponseError.type ResponseError.param
    """,
    ("openai", ABSENT, "the answer echoes effort and summary"): "Reasoning.context",
    ("openai", ABSENT, "the older name of summary"): "Reasoning.generate_summary",
    ("openai", ABSENT, "Open Responses knows no null; " + _OPTIONAL): """
        ResponseReasoningItem.encrypted_content
    """,
    ("openai", ABSENT, "Open Responses knows no null"): "ResponseOutputMessage.phase Message.phase",
    ("openai", ABSENT, _OPTIONAL): """
        LocalShellCall.Action.timeout_ms LocalShellCall.Action.user
        LocalShellCall.Action.working_directory McpListTools.error McpListTools.Tool.annotations
        McpListTools.Tool.description McpApprovalResponse.reason
        ResponseApplyPatchToolCallOutput.output
    """,
    ("openai", NULL, "as OpenAI's answers have it"): """
        McpCall.approval_request_id McpCall.error McpCall.output
    """,
    ("openai", AS_ASKED, "the request's own object"): """
        FunctionShellTool.environment CodeInterpreterToolAuto.memory_limit Mcp.allowed_tools
        Mcp.headers Mcp.require_approval ToolSearchTool.description ToolSearchTool.parameters
        WebSearchTool.filters WebSearchTool.user_location
    """,
    ("openai", ABSENT, "every call is the model's own"): "allowed_callers caller",
    ("openai", NULL, _VLLM): """
        ChatCompletion.Choice.stop_reason ChatCompletionChunk.Choice.stop_reason
        CompletionChoice.stop_reason ChatCompletionMessage.reasoning
        ChatCompletionMessage.reasoning_content Model.parent ChatCompletion.prompt_logprobs
        ChatCompletion.prompt_token_ids ChatCompletion.Choice.token_ids
        CompletionChoice.prompt_logprobs CompletionChoice.prompt_token_ids CompletionChoice.token_ids
    """,
    ("openai", NULL, "a stored completion, " + _EXAMPLE): """
        ChatCompletion.response_format ChatCompletion.seed ChatCompletion.temperature
        ChatCompletion.tool_choice ChatCompletion.tools ChatCompletion.top_p
        ChatCompletion.presence_penalty ChatCompletion.frequency_penalty
    """,
    ("open_responses", NULL, "OpenAI's"): "ResponseResource.conversation ResponseResource.user",
    ("anthropic", ABSENT, _OTHERS): "ToolUseBlock.toolset_name",
}

# (provider, conflict with the types, reason for it) -> fields
_EXCEPTIONS: dict[tuple[str, str, str], str] = {
    ("openai", "unknown", "asked for with return_token_ids (vLLM's)"): """
        ChatCompletion.prompt_token_ids ChatCompletionChunk.prompt_token_ids
        CompletionChoice.prompt_token_ids Choice.token_ids CompletionChoice.token_ids
    """,
    ("openai", "unknown", "vLLM's"): """
        ChatCompletion.prompt_logprobs CompletionChoice.prompt_logprobs
        OutputTokensDetails.tool_output_tokens Choice.stop_reason CompletionChoice.stop_reason
        Model.max_model_len Model.parent Model.permission Model.root
    """,
    ("openai", "unknown", "reasoning: OpenRouter's and vLLM's name"): """
        ChatCompletionMessage.reasoning Delta.reasoning
    """,
    ("openai", "unknown", "reasoning: DeepSeek's name"): """
        ChatCompletionMessage.reasoning_content Delta.reasoning_content
    """,
    ("openai", "unknown", "OpenAI streams them so; the type has them in the message only"): """
        Delta.annotations
    """,
    ("openai", "unknown", "ours (docs/reference/api.md)"): """
        ChatCompletionMessage.builtin_tool_calls Delta.builtin_tool_calls
    """,
    ("openai", "unknown", _STORED): """
        ChatCompletion.response_format ChatCompletion.seed ChatCompletion.temperature
        ChatCompletion.tool_choice ChatCompletion.tools ChatCompletion.top_p
        ChatCompletion.presence_penalty ChatCompletion.frequency_penalty
    """,
    ("openai", "not a str", "messages of the user, as in OpenAI's example"): """
        ChatCompletionStoreMessage.role
    """,
    ("openai", "missing", "messages of the user, as in OpenAI's example"): """
        ChatCompletionStoreMessage.refusal
    """,
    ("openai", "null", _CHUNK): "Completion.usage CompletionChoice.finish_reason",
    ("openai", "null", "with echo the first token has none"): """
        CompletionChoice.Logprobs.token_logprobs CompletionChoice.Logprobs.top_logprobs
    """,
    ("openai", "missing", "the SDK makes it of the output"): "Response.output_text",
    ("openai", "missing", "of OpenAI accounts"): "Response.access_programs",
    ("openai", "null", "until the end: OpenAI's examples have null, Open Responses requires the key"): """
        Response.usage
    """,
    ("openai", "null", "OpenAI's examples have null"): "Response.user",
    ("openai", "unknown", "required by Open Responses"): """
        Response.frequency_penalty Response.presence_penalty Response.store
    """,
    ("openai", "null", "required by Open Responses"): "ResponseFormatTextJSONSchemaConfig.description",
    ("openai", "unknown", "the type of the same item in lists has it"): """
        ResponseCustomToolCall.status ResponseCustomToolCallOutput.status
    """,
    ("openai", "unknown", "every other output has it; OpenAI has it in the id"): """
        LocalShellCallOutput.call_id
    """,
    ("openai", "unknown", "asked for with include"): "ResponseFunctionWebSearch.results",
    ("openai", "unknown", _OLDER): "ResponseFunctionCallArgumentsDoneEvent.name",
    ("openai", "unknown", "asked for with include_obfuscation"): """
        ResponseTextDeltaEvent.obfuscation ResponseReasoningTextDeltaEvent.obfuscation
        ResponseReasoningSummaryTextDeltaEvent.obfuscation
    """,
    ("openai", "unknown", "required by Open Responses, and in the item's type"): """
        Logprob.bytes TopLogprob.bytes
    """,
    ("openai", "no type message", "the user's messages, as in OpenAI's example"): "CompactedResponse.output",
    ("openai", "null", "an empty list has no first item"): "ConversationItemList.first_id",
    ("openai", "null", "an empty list has no last item"): "ConversationItemList.last_id",
    ("open_responses", "unknown", "OpenAI's"): """
        ResponseResource.conversation ResponseResource.user ReasoningBody.status
        FunctionCall.namespace InputTokensDetails.cache_write_tokens
        ResponseFunctionCallArgumentsDoneEvent.name
    """,
    ("open_responses", "unknown", "vLLM's"): "OutputTokensDetails.tool_output_tokens",
    (
        "open_responses",
        "not a dict",
        "published as null only, so that no schema could be echoed; OpenAI echoes it",
    ): """
        JsonSchemaResponseFormat.schema
    """,
    ("anthropic", "missing", _UNNAMED): """
        TextBlock.citations Message.container Message.diagnostics Message.stop_details
        Delta.container Delta.stop_details Usage.cache_creation Usage.inference_geo
        Usage.server_tool_use Usage.speed MessageDeltaUsage.server_tool_use
    """,
    ("anthropic", "no type ping", "documented, but not in the type"): "RawMessageStreamEvent.",
    ("anthropic", "no type error", "documented, but not in the type"): "RawMessageStreamEvent.",
}

UNSET: dict[tuple[str, str], tuple[str, str]] = {
    (provider, field): (state, why)
    for (provider, state, why), fields in _UNSET.items()
    for field in fields.split()
}
EXCEPTIONS: dict[tuple[str, str, str], str] = {
    (provider, field, what): why
    for (provider, what, why), fields in _EXCEPTIONS.items()
    for field in fields.split()
}

# Types of items, tools and events that Open Responses does not publish. A client gets them only if it asked
# for the tool; they have OpenAI's form.
BEYOND_OPEN_RESPONSES = (
    "apply_patch", "code_interpreter", "compaction.compacting", "custom", "local_shell", "mcp", "namespace",
    "shell", "tool_search", "web_search",
)  # fmt: skip


def find_unset(provider: str, name: str) -> tuple[str, str] | None:
    """Returns the row whose field is ``name`` or an end of it."""
    rows = [row for (of, end), row in UNSET.items() if of == provider and is_end(name, end)]
    return rows[0] if rows else None


def find_exception(provider: str, name: str, what: str) -> tuple[str, str, str] | None:
    """Returns the key of the exception for a fault; the longest matching end takes precedence."""
    keys = [key for key in EXCEPTIONS if key[0] == provider and is_end(name, key[1]) and key[2] == what]
    return max(keys, key=lambda key: len(key[1]), default=None)


def is_beyond(provider: str, what: str) -> bool:
    kind = what.removeprefix("no type ").removeprefix("response.")
    return provider == "open_responses" and what != kind and kind.startswith(BEYOND_OPEN_RESPONSES)


def is_end(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")
