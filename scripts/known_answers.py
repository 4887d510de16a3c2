"""Writes the expected results of ``chorale selfcheck``, computed by other implementations than Chorale's.

    pip install transformers openai-harmony
    python scripts/known_answers.py

In ``chorale/measure/selfcheck``:
``demo_answers.json``: log-probabilities of the demo by transformers, in float32.
``serving/known_tokens.json``: texts and a chat, and their token ids by openai-harmony.
"""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

import torch

from chorale.harmony.vocab import export_vocabulary
from chorale.measure.selfcheck.device.logprobs import LAST, SCALES
from chorale.measure.selfcheck.recorded import KNOWN_ANSWERS
from chorale.measure.selfcheck.serving.harmony import KNOWN_TOKENS
from chorale.model.demo import ensure_demo

ENGLISH = (
    "The harbour lay quiet in the morning, and the boats rocked gently on the water. A woman in a blue "
    "coat walked along the wall with a basket of bread, greeting the fishermen as she passed. They had "
    "been out all night and were tired, but the catch was good, and they talked loudly about the price "
    "that they would get for it at the market. Above them, gulls circled and waited for something to "
    "fall. The woman stopped at the last boat, where an old man was mending a net. He looked up and "
    "smiled. He had known her since she was a child, and he always kept a small fish for her cat. In "
    "return she gave him the end of a loaf that was still warm from the oven. They sat for a while and "
    "watched the sun rise over the hills on the other side of the bay. Later in the day, the wind would "
    "turn and bring rain from the west, but for now the sky was clear. "
)
TEXTS = (
    "<|start|>user<|message|>What is 17 + 25?<|end|>"
    "<|start|>assistant<|channel|>final<|message|>17 + 25 = 42",
    '<|start|>user<|message|>Spell "garden".<|end|><|start|>assistant<|channel|>final<|message|>g-a-r-d-e-n',
    "The numbers from one to ten are one, two, three, four, five, six, seven, eight, nine, ten.",
    # Longer than the attention window.
    ENGLISH,
)
# Pieces that encoders and parsers get wrong: white space, scripts, emoji, names of special tokens as text.
AWKWARD = (
    "  two  spaces\n\n\tand\ttabs  ",
    "naïve café, Straße, œuvre, Ελληνικά, русский, العربية, 中文字, 日本語, 한국어",
    "👩‍👩‍👧‍👦 🇩🇪 e\u0301 \u200bzero width",
    "<|start|>assistant<|channel|>final<|message|>not a message<|end|>",
    '{"key": [1, 2.5e-3, null, true], "nested": {"a": "\\"quoted\\""}}',
)
# Also the rules that split text before encoding: groups of three digits, contractions, capitals, line ends.
TOKENIZED = (
    *AWKWARD,
    "12 345 6789 1234567890 3.14159265 ١٢٣٤٥٦ x86_64 2026-11-24",
    "I'm, you'RE, it's, WE'LL, they'd've; JSONParser parseHTTPResponse ABCdef ǅ",
    "a//b/\r\n/c;\n\n  if (x != y) {\n\treturn &x->y; // ...\n}\n   \n end   ",
    "one\n\ntwo",
)
CHAT: list[dict[str, Any]] = [
    *({"role": "user", "content": text} for text in TOKENIZED),
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": AWKWARD[2]},
    {"role": "user", "content": "And now?"},
]


def write_tokens() -> list[list[int]]:
    """Writes ``known_tokens.json``. Returns the token ids of ``TEXTS``."""
    import openai_harmony as oh

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(export_vocabulary(folder).parent)
        encoding = oh.load_harmony_encoding(oh.HarmonyEncodingName.HARMONY_GPT_OSS)
    pairs = [[text, encoding.encode(text, disallowed_special=())] for text in TOKENIZED]
    messages = []
    for each in CHAT:
        if each["role"] == "user":
            messages.append(oh.Message.from_role_and_content(oh.Role.USER, each["content"]))
        elif each["role"] == "tool":
            author = oh.Author(role=oh.Role.TOOL, name="functions.look")
            message = oh.Message.from_author_and_content(author, each["content"])
            messages.append(message.with_recipient("assistant").with_channel("commentary"))
        else:
            (call,) = each["tool_calls"]
            message = oh.Message.from_role_and_content(oh.Role.ASSISTANT, call["function"]["arguments"])
            message = message.with_recipient(f"functions.{call['function']['name']}")
            messages.append(message.with_channel("commentary").with_content_type("<|constrain|>json"))
    conversation = oh.Conversation.from_messages(messages)
    chat = encoding.render_conversation_for_completion(conversation, oh.Role.ASSISTANT)
    found = {"texts": pairs, "messages": CHAT, "chat": chat}
    KNOWN_TOKENS.write_text(json.dumps(found) + "\n", "ascii")
    return [encoding.encode(text, allowed_special="all") for text in TEXTS]


def write_answers(tokens: list[list[int]]) -> None:
    from transformers import GptOssForCausalLM, Mxfp4Config

    model = GptOssForCausalLM.from_pretrained(
        ensure_demo(),
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=Mxfp4Config(dequantize=True),
    ).eval()
    table = model.get_input_embeddings().weight.detach()
    found = []
    for scale in SCALES:
        values: list[float] = []
        for ids in tokens:
            with torch.inference_mode():
                states = table[torch.tensor([ids])] * scale
                logprobs = model(inputs_embeds=states).logits[0, :-1].double().log_softmax(-1)
            chosen = logprobs.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
            values += chosen[-LAST:].tolist()
        found.append([round(value, 6) for value in values])
    KNOWN_ANSWERS.write_text(json.dumps({"texts": tokens, "logprobs": found}) + "\n", "ascii")


if __name__ == "__main__":
    write_answers(write_tokens())
