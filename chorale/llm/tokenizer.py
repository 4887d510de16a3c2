"""HarmonyTokenizer: the vocabulary with the interface of transformers' tokenizer of gpt-oss."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from chorale.harmony.vocab import ENDOFTEXT, NUM_RANKS, RETURN, STARTOFTEXT, Vocabulary, special_name
from chorale.llm.params import UNUSED, check_names
from chorale.llm.prompts import ChatMessages, read_conversations, read_tools, render_chat

_ENDOFPROMPT = 200018  # the last id that has a name in transformers


class HarmonyTokenizer:
    """o200k_harmony, with the names, ids and defaults of transformers. Results are lists.

    ``encode`` and ``__call__`` read the names of special tokens in a text as these tokens, as transformers
    and ``LLM.generate`` do. For text of users, pass ``split_special_tokens=True``: the names then stay text.
    ``apply_chat_template`` never reads special tokens in the content of messages.
    """

    bos_token, bos_token_id = "<|startoftext|>", STARTOFTEXT
    eos_token, eos_token_id = "<|return|>", RETURN
    pad_token, pad_token_id = "<|endoftext|>", ENDOFTEXT
    unk_token, unk_token_id, chat_template = None, None, None
    all_special_tokens, all_special_ids = [bos_token, eos_token, pad_token], [STARTOFTEXT, RETURN, ENDOFTEXT]
    vocab_size = NUM_RANKS  # without the added tokens, which ``len`` includes
    is_fast, padding_side, truncation_side = True, "right", "right"

    def __init__(self, vocab: Vocabulary, model_max_length: int) -> None:
        self._vocab, self.model_max_length = vocab, model_max_length

    def __len__(self) -> int:
        return _ENDOFPROMPT + 1

    def encode(
        self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False, **unused: Any
    ) -> list[int]:
        """Return the ids of a text. ``add_special_tokens`` has no effect: harmony adds none."""
        check_names("encode", unused, (), UNUSED)
        if not isinstance(text, str):
            raise TypeError(f"encode needs a string, not {type(text).__name__}")
        return self._vocab.encode(text) if split_special_tokens else self._vocab.encode_with_special(text)

    def __call__(self, text: str | Sequence[str], **options: Any) -> Mapping[str, Any]:
        """Return the ``input_ids`` and ``attention_mask`` of a text or of each of several."""
        if isinstance(text, str):
            return _encoding(self.encode(text, **options))
        return _encoding([self.encode(each, **options) for each in text])

    def apply_chat_template(
        self,
        conversation: ChatMessages | Sequence[ChatMessages],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        reasoning_effort: str | None = None,
        model_identity: str | None = None,
        return_dict: bool = False,
        **unused: Any,
    ) -> Any:
        """Return the prompt of a conversation (or of each of several): ids, or text without ``tokenize``.

        With ``add_generation_prompt``, the ids are those that ``LLM.chat`` uses. Raises as ``LLM.chat`` does.
        """
        check_names("apply_chat_template", unused, (), UNUSED)
        several = read_conversations(conversation)
        described = [function.tool for function in read_tools(tools)]
        found: list[Any] = []
        for messages in several:
            effort, end = reasoning_effort, add_generation_prompt
            prompt = render_chat(messages, described, effort, self._vocab, model_identity, for_completion=end)
            found.append(prompt.token_ids if tokenize else self._vocab.decode(prompt.token_ids))
        result = found[0] if isinstance(conversation[0], Mapping) else found
        return _encoding(result) if return_dict and tokenize else result

    def decode(self, token_ids: int | Iterable[Any], skip_special_tokens: bool = False, **_: Any) -> str:
        """Return the text of ids; bytes that are no UTF-8 become U+FFFD. Raises ``TokenIdError``."""
        ids = [token_ids] if isinstance(token_ids, int) else map(int, token_ids)  # of numpy or torch, too
        return self._vocab.decode(i for i in ids if not (skip_special_tokens and self._vocab.is_special(i)))

    def batch_decode(
        self, sequences: Iterable[Any], skip_special_tokens: bool = False, **_: Any
    ) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def convert_ids_to_tokens(self, ids: int | Iterable[Any], skip_special_tokens: bool = False) -> Any:
        """Return the token (or tokens) in transformers' spelling of bytes: a space is "Ġ". Only tokens of
        ``all_special_ids`` are skipped, as in transformers."""
        if isinstance(ids, int):
            return self._token(ids)
        skipped = self.all_special_ids if skip_special_tokens else ()
        return [self._token(token_id) for token_id in map(int, ids) if token_id not in skipped]

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """Return the id (or ids) of tokens as ``convert_ids_to_tokens`` spells them; None if unknown."""
        return self._ids.get(tokens) if isinstance(tokens, str) else [self._ids.get(each) for each in tokens]

    def get_vocab(self) -> dict[str, int]:
        return dict(self._ids)

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {self._token(token_id): token_id for token_id in range(len(self))}

    def _token(self, token_id: int) -> str:
        if token_id == _ENDOFPROMPT:
            return "<|endofprompt|>"
        if self._vocab.is_special(token_id):
            return special_name(token_id)
        return self._vocab.token_bytes(token_id).decode("latin-1").translate(_byte_names())


class _Encoding(dict[str, Any]):
    """A dictionary whose keys are also attributes."""

    __getattr__ = dict.__getitem__


def _encoding(ids: list[Any]) -> _Encoding:
    nested = bool(ids) and isinstance(ids[0], list)
    mask = [[1] * len(each) for each in ids] if nested else [1] * len(ids)
    return _Encoding(input_ids=ids, attention_mask=mask)


@functools.cache
def _byte_names() -> dict[int, str]:
    """Return the characters of byte-level BPE: a byte whose Latin-1 character is printable and no space is
    that character, the others follow each other from U+0100 on."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return {byte: chr(0x100 + n) for n, byte in enumerate(byte for byte in range(256) if byte not in shown)}
