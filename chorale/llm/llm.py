"""The LLM class: checks its arguments, opens the engine, runs prompts and conversations."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from chorale.client.base import EngineInfo
from chorale.config.engine import MOST_ENGINES, EngineConfig
from chorale.config.kv_events import KvEventsConfig, read_kv_events
from chorale.config.read_speculative import read_speculative
from chorale.config.sampling_fields import GENERATION, SAMPLING_FIELDS
from chorale.config.speculative import SpeculativeConfig
from chorale.engine.types import TokenChunk
from chorale.errors import ConfigError
from chorale.harmony.vocab import load_vocabulary
from chorale.llm.batch import Batch, Order
from chorale.llm.engine import OfflineEngine
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
from chorale.llm.turns import make_turn
from chorale.machine.devices import replica_environments
from chorale.turns.choice.choice import Choice
from chorale.turns.choice.raw_choice import RawChoice
from chorale.turns.request import TurnRequest
from chorale.turns.rules import TurnRules

if TYPE_CHECKING:
    from chorale.llm.many_engines import ManyEngines

logger = logging.getLogger(__name__)
_warned: list[str] = []  # names of warnings that this process has logged

# Arguments of vLLM's LLM that have no effect here, with the reason.
_IGNORED = {
    "tokenizer": "the harmony vocabulary is built in",
    "tokenizer_mode": "the harmony vocabulary is built in",
    "trust_remote_code": "no remote code is ever run",
    "tokenizer_revision": "the harmony vocabulary is built in",
    "cpu_offload_gb": "see cpu_offload_params",
    "max_seq_len_to_capture": "graphs are captured as needed",
    "disable_log_stats": "LLM logs no statistics",
    "enable_chunked_prefill": "prefill is always chunked",
    "distributed_executor_backend": "ranks are processes of one machine",
    "load_format": "safetensors is the only format",
    "skip_tokenizer_init": "the harmony vocabulary is built in",
}


# Attributes of vLLM's LLM that are missing here, with what to do instead.
_MISSING = {
    "get_tokenizer": "the vocabulary is o200k_harmony, which tiktoken and openai_harmony contain",
    "beam_search": "beam search is not supported",
    "sleep": "shutdown() frees the memory; a new LLM loads the model again",
    "wake_up": "shutdown() frees the memory; a new LLM loads the model again",
    "llm_engine": "the engine has no public interface",
    "collective_rpc": "the engine has no public interface",
    "apply_model": "the engine has no public interface",
} | dict.fromkeys(("encode", "embed", "classify", "score", "reward"), "gpt-oss only generates text")


class LLM:
    """An engine in this process, with the interface of vLLM's ``LLM``.

    The thread that calls ``generate`` or ``chat`` runs the engine; a call from another thread waits until
    the first call has returned. ``shutdown`` (or leaving a ``with``) frees the memory.

    An unknown argument is a ``TypeError``, a bad value a ``ConfigError``. None means: let Chorale decide.
    """

    def __init__(self, model: str | os.PathLike[str] = "demo", **options: Unpack[EngineOptions]) -> None:
        self._vocab = load_vocabulary()
        count = _count_of_engines(options.pop("data_parallel_size", None))
        try:
            self._engine = _open(_config(model, dict(options), count), count)
        except ConfigError as error:
            error.message = as_arguments(error.message)
            error.args = (error.message,)
            raise
        for note in self.info.notes:
            logger.warning("%s", note)
        self._numbers = itertools.count()

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

    def generate(
        self,
        prompts: OnePrompt | Sequence[OnePrompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    ) -> list[RequestOutput]:
        """Return one RequestOutput per prompt, in order. ``sampling_params``: one for all, or one per prompt.

        ``use_tqdm``: whether to show a progress bar on a terminal, or a callable that takes tqdm's arguments
        and returns a bar. If a single choice fails, its ``finish_reason`` is "error". Raises ``ValueError``,
        ``TypeError`` or ``ChoraleError`` for bad arguments before anything runs, ``EngineError`` if the
        engine fails or is shut down."""
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

        return self._run(read, params, use_tqdm, rules, choice)

    def chat(
        self,
        messages: ChatMessages | Sequence[ChatMessages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reasoning_effort: str | None = None,
    ) -> list[RequestOutput]:
        """Return one RequestOutput for a conversation (a list of messages), or one for each of several.

        The server renders the same messages to the same prompt. In each choice, ``text`` is the answer,
        without ``reasoning`` and ``tool_calls``; arguments of a ``strict`` tool satisfy its schema. A choice
        with calls has the ``finish_reason`` "stop", as in vLLM: test ``tool_calls``.

        Without ``sampling_params``, answers are limited by the model's ``max_new_tokens`` or the context
        length. ``SamplingParams(...)`` without ``max_tokens`` allows 16 tokens, reasoning included: pass
        ``max_tokens=None`` for no limit but the context length."""
        several = read_conversations(messages)
        functions = read_tools(tools)
        described = [function.tool for function in functions]
        prompts = [render_chat(some, described, reasoning_effort, self._vocab) for some in several]
        params = _for_each(sampling_params, self._chat_defaults, len(prompts))
        eos = frozenset(self.info.eos_token_ids)

        def rules(own: SamplingParams) -> TurnRules:
            return TurnRules(functions=functions, answer=own.constraint())

        def choice(turn: TurnRequest, own: SamplingParams, index: int) -> Choice:
            return Choice(self._vocab, turn, index, eos)

        outputs = self._run(prompts, params, use_tqdm, rules, choice)
        for own, output in zip(params, outputs, strict=True):
            _warn_of_empty(own, output)
        return outputs

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

    def _run(
        self,
        prompts: list[Prompt],
        params: list[SamplingParams],
        use_tqdm: UseTqdm,
        make_rules: Callable[[SamplingParams], TurnRules],
        make_choice: Callable[[TurnRequest, SamplingParams, int], Choice | RawChoice],
    ) -> list[RequestOutput]:
        """Check all prompts, then run them. The engine gets all of them at once, in order."""
        self._engine.require_ready()
        rules = {key: make_rules(own) for key, own in {id(own): own for own in params}.items()}
        batch = Batch(self._vocab, self.info.max_model_len)
        for prompt, own in zip(prompts, params, strict=True):
            request_id = str(next(self._numbers))
            turn = make_turn(request_id, prompt, own, rules[id(own)], self.info, self._vocab)
            batch.add(prompt, own, turn, [make_choice(turn, own, index) for index in range(own.n)])
        progress = make_progress(len(prompts), use_tqdm, self._engine.stats)

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


def _config(model: str | os.PathLike[str], options: dict[str, Any], count: int) -> EngineConfig:
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    for name in [name for name in options if name in _IGNORED]:
        logger.warning("LLM: %s has no effect: %s", name, _IGNORED[name])
        del options[name]
    _rename_host_tier_options(options)
    check_names("LLM", options, names)
    given = {name: value for name, value in options.items() if value is not None}  # None: default
    speculative = _speculative(given.pop("speculative_config", None))
    kv_events = _kv_events(given.pop("kv_events_config", None), given.get("enable_prefix_caching"), count)
    given.setdefault("prompt_delay", 0.0)  # without streams, prefill may delay running rows
    try:
        config = msgspec.convert({"model": os.fspath(model), **given}, EngineConfig)
        config = dataclasses.replace(config, speculative_config=speculative, kv_events_config=kv_events)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        raise ConfigError(f"LLM: {path.rstrip('`')}: {reason}") from None
    override = config.override_generation_config or {}
    check_names("override_generation_config", override, list(GENERATION))
    SamplingParams.from_defaults(override)  # raises for values that are out of range
    return config


def _rename_host_tier_options(options: dict[str, Any]) -> None:
    """Replace vLLM's ``swap_space`` and ``kv_offloading_backend`` by ``kv_offloading_size``."""
    backend, size = options.pop("kv_offloading_backend", None), options.pop("swap_space", None)
    if backend not in (None, "native"):
        raise ConfigError(f"LLM: kv_offloading_backend={backend!r}: the only backend is native")
    if size is not None and options.get("kv_offloading_size") is None:
        options["kv_offloading_size"] = size


def _speculative(given: Any) -> SpeculativeConfig | None:
    if given is None or isinstance(given, SpeculativeConfig):
        return given
    config, notices = read_speculative(given, "LLM: speculative_config")
    for notice in notices:
        logger.warning("%s", notice)
    if config.is_synthetic:
        logger.warning(
            "SYNTHETIC ACCEPTANCE: draft tokens are accepted by a profile; the output has no meaning"
        )
    return config


def _kv_events(given: Any, caching: Any, count: int) -> KvEventsConfig | None:
    if given is None or isinstance(given, KvEventsConfig):
        return given
    config = read_kv_events(given, "LLM: kv_events_config", count)
    reason = config.why_silent(caching is not False)
    if reason:
        logger.warning("LLM: kv_events_config publishes nothing: %s", reason)
    return config


def _count_of_engines(size: Any) -> int:
    if size is None:
        return 1
    if not isinstance(size, int) or not 1 <= size <= MOST_ENGINES:
        raise ConfigError(f"LLM: data_parallel_size={size!r}: must be an integer, 1 to {MOST_ENGINES}")
    return int(size)


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
