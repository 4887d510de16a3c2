"""Tasks that other tools define and run, unmodified, against a server: the command for each.

The tools are installed in environments of their own, because their requirements exclude each other.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass

LM_EVAL, INSPECT, BFCL = "lm_eval[api,ifeval]==0.4.13", "inspect-evals==0.26.0 openai", "bfcl-eval==2026.3.23"
# bfcl-eval knows no gpt-oss. It asks this model for tool calls through the Responses API.
BFCL_MODEL = "gpt-4.1-2025-04-14"
# lm-eval's own limits, 2,048 tokens and fewer, would cut the reasoning.
MAX_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line asked for. ``url`` ends in /v1; ``effort`` is None for the model's default."""

    task: str
    url: str
    model: str
    effort: str | None
    limit: int | None
    concurrency: int
    folder: str


def lm_eval(wanted: Wanted) -> list[str]:
    model = f"model={wanted.model},base_url={wanted.url}/chat/completions"
    command = ["lm_eval", "run", "--model", "local-chat-completions", "--apply_chat_template"]
    command += ["--model_args", f"{model},num_concurrent={wanted.concurrency},timeout=3600"]
    command += ["--gen_kwargs", f"max_gen_toks={MAX_TOKENS}"]
    command += [f"reasoning_effort={wanted.effort}"] if wanted.effort else []
    command += ["--tasks", wanted.task, "--log_samples", "--output_path", wanted.folder]
    command += ["--limit", str(wanted.limit)] if wanted.limit else []
    return [f"OPENAI_API_KEY=unused {shlex.join(command)}"]


def inspect(wanted: Wanted) -> list[str]:
    command = ["inspect", "eval", f"inspect_evals/{wanted.task}", "--model"]
    command += [f"openai-api/chorale/{wanted.model}", "--max-connections", str(wanted.concurrency)]
    command += ["--reasoning-effort", wanted.effort] if wanted.effort else []
    command += ["--limit", str(wanted.limit)] if wanted.limit else []
    settings = f"CHORALE_API_KEY=unused CHORALE_BASE_URL={shlex.quote(wanted.url)}"
    return [f"{settings} {shlex.join([*command, '--log-dir', wanted.folder])}"]


def bfcl(wanted: Wanted) -> list[str]:
    _, _, category = wanted.task.partition("_")
    chosen = ["--model", f"{BFCL_MODEL}-FC", "--test-category", category or "non_live,live,multi_turn"]
    settings = f"BFCL_PROJECT_ROOT={shlex.quote(wanted.folder)} OPENAI_API_KEY=unused"
    generate = shlex.join(["bfcl", "generate", *chosen, "--num-threads", str(wanted.concurrency)])
    return [
        f"(the server, with a second name: --served-model-name {shlex.quote(wanted.model)} {BFCL_MODEL})",
        f"{settings} OPENAI_BASE_URL={shlex.quote(wanted.url)} {generate}",
        f"{settings} {shlex.join(['bfcl', 'evaluate', *chosen])}",
    ]


# task -> (requirement of the tool, commands)
ELSEWHERE: dict[str, tuple[str, Callable[[Wanted], list[str]]]] = {
    **dict.fromkeys(("gsm8k", "mmlu_pro", "ifeval"), (LM_EVAL, lm_eval)),
    "humaneval": (INSPECT, inspect),
    **dict.fromkeys(("bfcl", "bfcl_non_live", "bfcl_live", "bfcl_multi_turn"), (BFCL, bfcl)),
}


def explain(wanted: Wanted) -> str:
    """Returns which tool runs the task, and the commands that install and run it."""
    requirement, commands = ELSEWHERE[wanted.task]
    tool = requirement.partition("=")[0].partition("[")[0]
    lines = [f"pip install {' '.join(map(shlex.quote, requirement.split()))}", *commands(wanted)]
    return "\n  ".join([f"{wanted.task} is a task of {tool}, which runs it against a server:", *lines])
