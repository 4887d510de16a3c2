"""The LLM class: checks its arguments, opens the engine, runs prompts and conversations."""

from __future__ import annotations

import base64
import inspect
import itertools
import logging
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, Unpack, get_args

from chorale.client.base import EngineInfo
from chorale.config.engine import EngineConfig
from chorale.config.options.vllm_flags import read_names
from chorale.config.sampling_fields import SAMPLING_FIELDS
from chorale.engine.commands import MEMORY, Action, Command, Outcome, PauseMode
from chorale.engine.types import TokenChunk
from chorale.errors import ChoraleError, ConfigError, ConflictError
from chorale.harmony.vocab import load_vocabulary
from chorale.llm.batch import Batch, Order, make_turn
from chorale.llm.configure import count_of_engines, engine_config
from chorale.llm.engine import OfflineEngine
from chorale.llm.lora import LlmAdapters, LoraOfPrompts
from chorale.llm.metrics import LlmMetrics, Metric
from chorale.llm.options import EngineOptions, as_arguments, engine_arguments, engine_signature, listed
from chorale.llm.outputs import RequestOutput
from chorale.llm.params import UNUSED, SamplingParams, check_names
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
from chorale.machine.devices import replica_environments
from chorale.turns.functions import Function
from chorale.turns.rules import TurnRules

if TYPE_CHECKING:
    from chorale.llm.many_engines import ManyEngines

ParamsOfPrompts = SamplingParams | Sequence[SamplingParams] | None
logger = logging.getLogger(__name__)
_warned: list[str] = []  # names of warnings that this process has logged

_TAGS = (*MEMORY, "scheduling")
# Attributes of vLLM's LLM that are missing here, with the reason.
_MISSING = {line.name: line.reason for line in read_names("LLM") if line.treatment == "refused"}


class LLM:
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
            raise _in_arguments(error) from error.__cause__
        for note in self.info.notes:
            logger.warning("%s", as_arguments(note))
        self._numbers = itertools.count()
        self._metrics = LlmMetrics(self.info.model)
        self._metrics.watch(self._engine)
        self._adapters = LlmAdapters()
        self._queued, self._sleeps = self._batch(), False

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> Self:
        """Return an LLM from a mapping of arguments, or an object that has them as attributes."""
        return cls(**(engine_args if isinstance(engine_args, Mapping) else vars(engine_args)))

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
        lora_request: LoraOfPrompts = None,
        **unused: Any,
    ) -> list[RequestOutput]:
        """Return one RequestOutput per prompt, in order. ``sampling_params`` and ``lora_request``: one for
        all, or one per prompt.

        ``use_tqdm``: whether to show a progress bar on a terminal, or a callable that takes tqdm's arguments
        and returns a bar. If a single choice fails, its ``finish_reason`` is "error". Raises
        ``ValueError``, ``TypeError`` or ``ChoraleError`` for bad arguments before anything runs,
        ``EngineError`` if the engine fails or is shut down."""
        check_names("generate", unused, (), UNUSED)
        batch, read = self._batch(), read_prompts(prompts, prompt_token_ids, self._vocab)
        self._add(batch, read, sampling_params, lora=lora_request)
        return self._run(batch, use_tqdm)

    def enqueue(
        self,
        prompts: OnePrompt | Sequence[OnePrompt],
        sampling_params: ParamsOfPrompts = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoraOfPrompts = None,
        **unused: Any,
    ) -> list[str]:
        """Keep prompts for ``wait_for_completion``, which runs them. Returns their request ids."""
        check_names("enqueue", unused, (), UNUSED)
        read = read_prompts(prompts, None, self._vocab)
        return self._add(self._queued, read, sampling_params, lora=lora_request)

    def wait_for_completion(
        self, output_type: Any = None, *, use_tqdm: UseTqdm = True
    ) -> list[RequestOutput]:
        """Run the prompts of ``enqueue`` and ``enqueue_chat``, and return their outputs in that order."""
        self._require_awake()
        batch, self._queued = self._queued, self._batch()
        return self._run(batch, use_tqdm)

    def chat(
        self,
        messages: ChatMessages | Sequence[ChatMessages],
        sampling_params: ParamsOfPrompts = None,
        use_tqdm: UseTqdm = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reasoning_effort: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoraOfPrompts = None,
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
        self._add_chats(batch, messages, sampling_params, lora_request=lora_request, **options)
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
        lora_request: LoraOfPrompts = None,
        **unused: Any,
    ) -> list[str]:
        template = {"reasoning_effort": reasoning_effort, **(chat_template_kwargs or {})}
        check_names("chat", unused, (), UNUSED)
        check_names("chat_template_kwargs", template, ("reasoning_effort", "model_identity"))
        effort, identity = template["reasoning_effort"], template.get("model_identity")
        if not add_generation_prompt:
            raise ValueError("chat: add_generation_prompt must be true")
        functions = read_tools(tools)
        several = read_conversations(messages)
        described = [function.tool for function in functions]
        prompts = [render_chat(some, described, effort, self._vocab, identity) for some in several]
        return self._add(batch, prompts, sampling_params, functions, lora_request)

    # ------------------------------------------------------------------ administration

    # A command waits until a call that runs in another thread has returned. With several engines, all of them
    # execute it. It raises ``ConflictError`` if the state of the engine does not allow it.

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return the number of ranks, of all engines or of one."""
        return self._engine.info.tensor_parallel_size * (len(self._engine.engines) if include_dp else 1)

    def get_metrics(self) -> list[Metric]:
        """Return vLLM's metrics since the start: counters, gauges, histograms, and a vector with drafts."""
        return self._metrics.read()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache, that in host memory included. Returns whether it was emptied."""
        return self._control("reset_prefix_cache", preempt=reset_running_requests).success

    def reset_mm_cache(self) -> None:
        """Do nothing: gpt-oss reads text only."""

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Stop generating. Level 1 moves the weights to host memory and drops the KV cache, level 2 drops
        both, level 0 keeps them. Enqueued prompts run first ("wait"), end ("abort"), or stay ("keep")."""
        if level not in (0, 1, 2) or mode not in get_args(PauseMode):
            modes = ", ".join(get_args(PauseMode))
            raise ValueError(
                f"sleep: level must be 0, 1 or 2 and mode one of {modes}, not {level!r}, {mode!r}"
            )
        if mode == "wait" and not self._sleeps:
            self._engine.run(self._queued.requests(), self._queued.take)
        self._sleeps = self._control("sleep", level=level, mode=mode).is_sleeping
        if mode == "abort":
            self._queued.abort()

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Restore memory ("weights", "kv_cache"; None: all) and generate again once all of it is back.
        ``["scheduling"]`` ends a sleep of level 0. Returns whether the engine is awake."""
        wrong = [tag for tag in tags or () if tag not in _TAGS] if not isinstance(tags, str) else [tags]
        if wrong:
            raise ValueError(f"wake_up: tags must be a list of {', '.join(_TAGS)}, not {wrong}")
        self._sleeps = self._control("wake_up", tags=tuple(tags or ())).is_sleeping
        return not self._sleeps

    def start_profile(self, profile_prefix: str | None = None, **options: Any) -> None:
        """Start torch's profiler as ``profiler_config`` says. Options of one session are a ``ValueError``."""
        names = ("profile_prefix", "delay_iterations", "max_iterations", "profiler_kwargs")
        refused = dict.fromkeys(names, "set it in profiler_config")
        check_names("start_profile", {"profile_prefix": profile_prefix, **options}, (), refused)
        self._control("start_profile")

    def stop_profile(self) -> None:
        """End the profile and write its files."""
        self._control("stop_profile")

    def init_weight_transfer_engine(self, request: Any) -> None:
        """Prepare the transfer: ``{"init_info": {...}}``, with the keys of the backend."""
        self._control("init_weight_transfer_engine", info=_info_of(request, "init_info"))

    def shutdown_weight_transfer_engine(self) -> None:
        """Close the connection to the sender."""
        self._control("shutdown_weight_transfer_engine")

    def start_weight_update(self) -> None:
        """Begin an update. The old weights stay until it is finished, or if a call of it fails."""
        if not self._sleeps:  # else the weights are awake, and the KV cache is not
            self._control("pause", mode="keep")
        self._update("start_weight_update")

    def update_weights(self, request: Any) -> None:
        """Receive tensors: ``{"update_info": {...}}``. Raises ``ConflictError`` if they do not fit."""
        info = dict(_info_of(request, "update_info"))
        if (handles := info.pop("ipc_handles", None)) is not None:
            info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
        self._update("update_weights", info=info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Use the new weights. ``weight_version``: their label; None: the number of updates."""
        self._update("prepare_weight_update")
        self._update("finish_weight_update", version=weight_version or "")
        if not self._sleeps:
            self._control("resume")

    def update_weight_version(self, new_version: str) -> None:
        """Label the weights, which stay the same."""
        self._control("update_weight_version", version=new_version)

    def get_weight_version(self) -> str:
        """Return the label of the weights; "default" before the first update."""
        return self._control("state").weight_version

    def _update(self, action: Action, **fields: Any) -> None:
        try:
            self._control(action, **fields)
        except ConflictError:
            self._control("abandon_weight_update")  # in all engines
            if not self._sleeps:
                self._control("resume")
            raise

    def shutdown(self) -> None:
        """Stop the engine and free its memory. Idempotent."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # ------------------------------------------------------------------ running

    def _control(self, action: Action, **fields: Any) -> Outcome:
        try:
            return self._engine.control(Command(action=action, **fields))
        except ChoraleError as error:
            raise _in_arguments(error) from None

    def _require_awake(self) -> None:
        self._engine.require_ready()
        if self._sleeps:
            raise ConflictError("the engine sleeps; call wake_up() first")

    def _batch(self) -> Batch:
        return Batch(self._vocab, self.info, self._metrics)

    def _add(
        self,
        batch: Batch,
        prompts: list[Prompt],
        given: ParamsOfPrompts,
        functions: tuple[Function, ...] | None = None,
        lora: LoraOfPrompts = None,
    ) -> list[str]:
        """Check all prompts, then add them to ``batch``. Returns their request ids. ``functions``: those of a
        chat; None: the prompts are raw."""
        is_raw, defaults = functions is None, self.info.default_sampling
        unlimited = {} if is_raw or "max_new_tokens" in defaults else {"max_tokens": None}
        params = _for_each(given, lambda: SamplingParams.from_defaults(defaults, **unlimited), len(prompts))
        self._engine.require_ready()
        rules = {
            key: TurnRules(functions=functions or (), answer=own.constraint(), raw=is_raw)
            for key, own in {id(own): own for own in params}.items()
        }
        adapters = self._adapters.refs(lora, len(prompts))
        if any(each.id for each in adapters) and not self.info.max_loras:
            raise ValueError("lora_request: adapters are off; LLM(enable_lora=True) turns them on")
        turns = []
        for prompt, own, adapter in zip(prompts, params, adapters, strict=True):
            request_id = str(next(self._numbers))
            turn = make_turn(request_id, prompt, own, rules[id(own)], self.info, self._vocab)
            turns.append(replace(turn, adapter=adapter))
        for prompt, own, turn in zip(prompts, params, turns, strict=True):
            batch.add(prompt, own, turn)
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


def _info_of(request: Any, name: str) -> dict[str, Any]:
    info = request.get(name) if isinstance(request, Mapping) else getattr(request, name, None)
    if not isinstance(info, dict):
        raise ValueError(f"{name} must be a dictionary")
    return info


def _in_arguments(error: ChoraleError) -> ChoraleError:
    """Return the error with the names of arguments in place of those of flags."""
    error.message = as_arguments(error.message)
    error.args = (error.message,)
    return error


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
