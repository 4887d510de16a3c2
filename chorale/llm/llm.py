"""The LLM class: checks its arguments, opens the engine, runs prompts and conversations."""

from __future__ import annotations

import inspect
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from chorale.client.base import EngineInfo
from chorale.config.engine import EngineConfig
from chorale.config.sampling_fields import SAMPLING_FIELDS
from chorale.engine.types import TokenChunk
from chorale.errors import ChoraleError, ConfigError
from chorale.harmony.vocab import load_vocabulary
from chorale.llm.administration import Administration, in_arguments
from chorale.llm.batch import Batch, Order
from chorale.llm.configure import count_of_engines, engine_config
from chorale.llm.engine import OfflineEngine
from chorale.llm.metrics import LlmMetrics
from chorale.llm.options import EngineOptions, as_arguments, engine_arguments, engine_signature, listed
from chorale.llm.outputs import RequestOutput
from chorale.llm.params import SamplingParams, check_names
from chorale.llm.progress import UseTqdm, make_progress
from chorale.llm.prompts import (
    ChatMessages,
    OnePrompt,
    Prompt,
    read_conversations,
    read_prompts,
    read_tools,
    render_chat,
)
from chorale.llm.tokenizer import HarmonyTokenizer
from chorale.llm.turns import make_turn
from chorale.machine.devices import replica_environments
from chorale.turns.choice.choice import Choice
from chorale.turns.choice.raw_choice import RawChoice
from chorale.turns.request import TurnRequest
from chorale.turns.rules import TurnRules

if TYPE_CHECKING:
    from chorale.llm.many_engines import ManyEngines

ParamsOfPrompts = SamplingParams | Sequence[SamplingParams] | None
logger = logging.getLogger(__name__)
_warned: list[str] = []  # names of warnings that this process has logged

# Arguments of vLLM's methods that may only have a value that asks for nothing.
_UNUSED = {
    "lora_request": "adapters are not supported",
    "tokenization_kwargs": "get_tokenizer().encode has options; pass the ids",
    "mm_processor_kwargs": "gpt-oss reads text only",
    "priority": "prompts run in the order in which they are given",
    "chat_template": "messages are always rendered as harmony",
    "continue_final_message": "the server's chat API has it",
}
_INTERNAL = "the engine has no public interface"
_TRAINER = "weights cannot be replaced; load another checkpoint"
# Attributes of vLLM's LLM that are missing here, with the reason.
_MISSING = {
    "beam_search": "beam search is not supported",
    "release_kv_cache_memory": "sleep() releases it together with the weights",
    **dict.fromkeys(("llm_engine", "collective_rpc", "apply_model", "model_config"), _INTERNAL),
    **dict.fromkeys(("encode", "embed", "classify", "score", "reward"), "gpt-oss only generates text"),
    **dict.fromkeys(
        ("init_weight_transfer_engine", "shutdown_weight_transfer_engine", "start_weight_update",
         "start_draft_weight_update", "update_weights", "finish_weight_update", "update_weight_version",
         "get_weight_version"),
        _TRAINER,
    ),
}  # fmt: skip


class LLM(Administration):
    """An engine in this process, with the interface of vLLM's ``LLM``.

    The thread that calls ``generate`` or ``chat`` runs the engine; a call from another thread waits until
    the first call has returned. ``shutdown`` (or leaving a ``with``) frees the memory.

    An unknown argument is a ``TypeError``, a bad value a ``ConfigError``. None means: let Chorale decide.
    """

    def __init__(self, model: str | os.PathLike[str] = "demo", **options: Unpack[EngineOptions]) -> None:
        self._vocab = load_vocabulary()
        count = count_of_engines(options.pop("data_parallel_size", None))
        try:
            self._engine = _open(engine_config(model, dict(options), count), count)
        except ChoraleError as error:
            raise in_arguments(error) from error.__cause__
        for note in self.info.notes:
            logger.warning("%s", as_arguments(note))
        self._numbers = itertools.count()
        self._metrics = LlmMetrics(self.info.model)
        self._metrics.watch(self._engine)
        self._queued = self._batch()

    def __getattr__(self, name: str) -> Any:
        reason = f" ({_MISSING[name]})" if name in _MISSING else ""
        raise AttributeError(f"LLM has no attribute {name!r}{reason}")

    @property
    def info(self) -> EngineInfo:
        """What the engine decided: lengths, sizes and types, and the device."""
        return self._engine.info

    def get_default_sampling_params(self) -> SamplingParams:
        """Return vLLM's defaults, overridden by the values in ``generation_config.json``."""
        return SamplingParams.from_defaults(self.info.default_sampling)

    def get_tokenizer(self) -> HarmonyTokenizer:
        """Return the tokenizer, which has the methods of transformers' tokenizer of gpt-oss."""
        return HarmonyTokenizer(self._vocab, self.info.max_model_len)

    def generate(
        self,
        prompts: OnePrompt | Sequence[OnePrompt] | None = None,
        sampling_params: ParamsOfPrompts = None,
        use_tqdm: UseTqdm = True,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        **unused: Any,
    ) -> list[RequestOutput]:
        """Return one RequestOutput per prompt, in order. ``sampling_params``: one for all, or one per prompt.

        ``use_tqdm``: whether to show a progress bar on a terminal, or a callable that takes tqdm's arguments
        and returns a bar. If a single choice fails, its ``finish_reason`` is "error". Raises
        ``ValueError``, ``TypeError`` or ``ChoraleError`` for bad arguments before anything runs,
        ``EngineError`` if the engine fails or is shut down."""
        batch = self._batch()
        self._add_prompts(batch, prompts, sampling_params, prompt_token_ids, unused)
        return self._run(batch, use_tqdm)

    def enqueue(
        self,
        prompts: OnePrompt | Sequence[OnePrompt],
        sampling_params: ParamsOfPrompts = None,
        *,
        use_tqdm: UseTqdm = True,
        **unused: Any,
    ) -> list[str]:
        """Keep prompts for ``wait_for_completion``, which runs them. Returns their request ids."""
        return self._add_prompts(self._queued, prompts, sampling_params, None, unused)

    def wait_for_completion(
        self, output_type: Any = None, *, use_tqdm: UseTqdm = True
    ) -> list[RequestOutput]:
        """Run the prompts of ``enqueue`` and ``enqueue_chat``, and return their outputs in that order."""
        self._require_awake()
        batch, self._queued = self._queued, self._batch()
        return self._run(batch, use_tqdm)

    def _add_prompts(
        self,
        batch: Batch,
        prompts: OnePrompt | Sequence[OnePrompt] | None,
        sampling_params: ParamsOfPrompts,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None,
        unused: Mapping[str, Any],
    ) -> list[str]:
        check_names("generate", unused, (), _UNUSED)
        read = read_prompts(prompts, prompt_token_ids, self._vocab)
        params = _for_each(sampling_params, self.get_default_sampling_params, len(read))
        eos = frozenset(self.info.eos_token_ids)

        def rules(own: SamplingParams) -> TurnRules:
            return TurnRules(answer=own.constraint(), raw=True)

        def choice(turn: TurnRequest, own: SamplingParams, index: int) -> RawChoice:
            return RawChoice(
                self._vocab,
                turn,
                index,
                eos,
                skip_special_tokens=own.skip_special_tokens,
                hide_stop=not own.include_stop_str_in_output,
            )

        return self._add(batch, read, params, rules, choice)

    def chat(
        self,
        messages: ChatMessages | Sequence[ChatMessages],
        sampling_params: ParamsOfPrompts = None,
        use_tqdm: UseTqdm = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reasoning_effort: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **unused: Any,
    ) -> list[RequestOutput]:
        """Return one RequestOutput for a conversation (a list of messages), or one for each of several.

        The server renders the same messages to the same prompt. In each choice, ``text`` is the answer,
        without ``reasoning`` and ``tool_calls``; arguments of a ``strict`` tool satisfy its schema. A choice
        with calls has the ``finish_reason`` "stop", as in vLLM: test ``tool_calls``.

        Without ``sampling_params``, answers are limited by the model's ``max_new_tokens`` or the context
        length. ``SamplingParams(...)`` without ``max_tokens`` allows 16 tokens, reasoning included: pass
        ``max_tokens=None`` for no limit but the context length.

        ``chat_template_kwargs`` may have ``reasoning_effort`` and ``model_identity``."""
        batch, effort, template = self._batch(), reasoning_effort, chat_template_kwargs
        options = {"tools": tools, "reasoning_effort": effort, "chat_template_kwargs": template, **unused}
        self._add_chats(batch, messages, sampling_params, **options)
        outputs = self._run(batch, use_tqdm)
        for own, output in zip(batch.params(), outputs, strict=True):
            _warn_of_empty(own, output)
        return outputs

    def enqueue_chat(
        self,
        messages: ChatMessages | Sequence[ChatMessages],
        sampling_params: ParamsOfPrompts = None,
        use_tqdm: UseTqdm = True,
        **options: Any,
    ) -> list[str]:
        """``enqueue`` for conversations; the arguments are those of ``chat``."""
        return self._add_chats(self._queued, messages, sampling_params, **options)

    def _add_chats(
        self,
        batch: Batch,
        messages: ChatMessages | Sequence[ChatMessages],
        sampling_params: ParamsOfPrompts,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reasoning_effort: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: str = "auto",  # content is read in either form
        **unused: Any,
    ) -> list[str]:
        template = {"reasoning_effort": reasoning_effort, **(chat_template_kwargs or {})}
        check_names("chat", unused, (), _UNUSED)
        check_names("chat_template_kwargs", template, ("reasoning_effort", "model_identity"))
        effort, identity = template["reasoning_effort"], template.get("model_identity")
        if not add_generation_prompt:
            raise ValueError("chat: add_generation_prompt must be true")
        functions = read_tools(tools)
        several = read_conversations(messages)
        described = [function.tool for function in functions]
        prompts = [render_chat(some, described, effort, self._vocab, identity) for some in several]
        params = _for_each(sampling_params, self._chat_defaults, len(prompts))
        eos = frozenset(self.info.eos_token_ids)

        def rules(own: SamplingParams) -> TurnRules:
            return TurnRules(functions=functions, answer=own.constraint())

        def choice(turn: TurnRequest, own: SamplingParams, index: int) -> Choice:
            return Choice(self._vocab, turn, index, eos)

        return self._add(batch, prompts, params, rules, choice)

    def shutdown(self) -> None:
        """Stop the engine and free its memory. Idempotent."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # ------------------------------------------------------------------ running

    def _chat_defaults(self) -> SamplingParams:
        defaults = self.info.default_sampling
        if "max_new_tokens" in defaults:
            return SamplingParams.from_defaults(defaults)
        return SamplingParams.from_defaults(defaults, max_tokens=None)

    def _batch(self) -> Batch:
        return Batch(self._vocab, self.info.max_model_len, self._metrics)

    def _add(
        self,
        batch: Batch,
        prompts: list[Prompt],
        params: list[SamplingParams],
        make_rules: Callable[[SamplingParams], TurnRules],
        make_choice: Callable[[TurnRequest, SamplingParams, int], Choice | RawChoice],
    ) -> list[str]:
        """Check all prompts, then add them to ``batch``. Returns their request ids."""
        self._engine.require_ready()
        rules = {key: make_rules(own) for key, own in {id(own): own for own in params}.items()}
        turns = []
        for prompt, own in zip(prompts, params, strict=True):
            request_id = str(next(self._numbers))
            turns.append(make_turn(request_id, prompt, own, rules[id(own)], self.info, self._vocab))
        for prompt, own, turn in zip(prompts, params, turns, strict=True):
            batch.add(prompt, own, turn, [make_choice(turn, own, index) for index in range(own.n)])
        return [turn.request_id for turn in turns]

    def _run(self, batch: Batch, use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Run a batch. The engine gets all prompts at once, in order."""
        self._require_awake()
        progress = make_progress(len(batch), use_tqdm, lambda: self._engine.stats)

        def take(chunks: list[TokenChunk]) -> list[Order]:
            orders = batch.take(chunks)
            progress.show(batch.num_done)
            return orders

        try:
            self._engine.run(batch.requests(), take)
        finally:
            progress.close(batch.num_done)
        return batch.outputs()


LLM.__init__.__signature__ = engine_signature()  # type: ignore[attr-defined]
LLM.__doc__ = f"{inspect.cleandoc(LLM.__doc__ or '')}\n\nArguments:\n\n{listed(engine_arguments())}\n"


def _open(config: EngineConfig, count: int) -> OfflineEngine | ManyEngines:
    if count > 1:
        from chorale.llm.many_engines import ManyEngines

        return ManyEngines(config, count)
    from chorale.serve.bootstrap import configured_secret
    from chorale.serve.engine.build import build_engine  # imports torch
    from chorale.serve.engine.kv_events.publisher import open_kv_events

    if config.device_ids:
        _choose_devices(config)
    publisher = open_kv_events(config.kv_events_config)
    try:
        core, info = build_engine(config, prefix_secret=configured_secret(config, os.environ))
    except BaseException:
        if publisher is not None:
            publisher.close()
        raise
    if publisher is not None:
        publisher.start(core)
    return OfflineEngine(core, info, publisher)


def _choose_devices(config: EngineConfig) -> None:
    """Sets the variable that chooses devices, for this process and its ranks."""
    import torch

    if torch.cuda.is_initialized():
        raise ConfigError("LLM: device_ids: this process uses CUDA already; set CUDA_VISIBLE_DEVICES instead")
    for chosen in replica_environments(config, 1) or ():
        os.environ |= chosen


def _for_each(
    given: SamplingParams | Sequence[SamplingParams] | None, default: Callable[[], SamplingParams], count: int
) -> list[SamplingParams]:
    if given is None:
        return [default()] * count
    if isinstance(given, SamplingParams):
        return [given] * count
    if not isinstance(given, Sequence) or not all(isinstance(each, SamplingParams) for each in given):
        raise TypeError("sampling_params must be a SamplingParams or a list with one per prompt")
    if len(given) != count:
        raise ValueError(f"{len(given)} sampling_params for {count} prompts")
    return list(given)


def _warn_of_empty(params: SamplingParams, output: RequestOutput) -> None:
    """Warn once if the default ``max_tokens``, which is vLLM's, cut an answer within its reasoning."""
    default = SAMPLING_FIELDS["max_tokens"].llm_default
    ended = any(one.finish_reason == "length" and not one.text for one in output.outputs)
    if ended and params.max_tokens == default and not _warned:
        _warned.append("max_tokens")
        logger.warning("an answer is empty: its reasoning used up the default max_tokens=%s", default)
