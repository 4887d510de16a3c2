"""Published scores to compare with. docs/evaluation.md, "Published scores", has settings and sources."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    """A published score, from 0 to 1. ``count``: answers behind it, 0 if unknown."""

    task: str
    model: str
    effort: str
    score: float
    source: str
    count: int = 0
    settings: str = ""


_EFFORTS = ("low", "medium", "high")
_LARGE, _SMALL = "gpt-oss-120b", "gpt-oss-20b"
_CARD = "OpenAI's model card"
_RECIPE = "vLLM's recipe"
_PYTORCH = "PyTorch's CI"
# Where a source does not say how often it asked, the 8 repeats of gpt_oss.evals are assumed.
_COUNTS = {
    "gpqa_diamond": 8 * 198,
    "aime25": 8 * 30,
    "mmlu": 14_042,
    "mmlu_pro": 12_032,
    "gsm8k": 1_319,
    "bfcl_multi_turn": 800,
}
_EVALS = "gpt_oss.evals, temperature 1"
_ON_VLLM = f"{_EVALS}, 8 repeats, vLLM on 8 H100"

# (source, settings, task, model, percent at low, medium and high; None where nothing was found)
_ROWS: tuple[tuple[str, str, str, str, tuple[float | None, float | None, float | None]], ...] = (
    (_CARD, "no tools; harness and repeats not stated", "gpqa_diamond", _LARGE, (67.1, 73.1, 80.1)),
    (_CARD, "no tools; harness and repeats not stated", "gpqa_diamond", _SMALL, (56.8, 66.0, 71.5)),
    (_CARD, "no tools; harness and repeats not stated", "aime25", _LARGE, (50.4, 80.0, 92.5)),
    (_CARD, "no tools; harness and repeats not stated", "aime25", _SMALL, (37.1, 72.1, 91.7)),
    (_CARD, "prompt not stated, so it may differ from ours", "mmlu", _LARGE, (85.9, 88.0, 90.0)),
    (_CARD, "prompt not stated, so it may differ from ours", "mmlu", _SMALL, (80.4, 84.0, 85.3)),
    (_RECIPE, _ON_VLLM, "gpqa_diamond", _LARGE, (65.3, 72.4, 79.4)),
    (_RECIPE, _ON_VLLM, "gpqa_diamond", _SMALL, (56.8, 67.5, 70.9)),
    (_RECIPE, _ON_VLLM, "aime25", _LARGE, (51.2, 79.6, 93.0)),
    (_RECIPE, _ON_VLLM, "aime25", _SMALL, (38.8, 75.0, 85.8)),
    (f"{_PYTORCH}, 8 H100", "harness not stated", "gpqa_diamond", _SMALL, (58.0, 67.0, 73.5)),
    (f"{_PYTORCH}, 8 H100", "harness not stated", "aime25", _SMALL, (34.2, 73.7, 84.2)),
    (f"{_PYTORCH}, 8 B200", "harness not stated", "gpqa_diamond", _SMALL, (56.8, 66.2, 72.9)),
    (f"{_PYTORCH}, 8 B200", "harness not stated", "aime25", _SMALL, (33.3, 71.7, 85.8)),
    (f"{_PYTORCH}, 8 H100", "harness not stated", "gpqa_diamond", _LARGE, (65.4, None, None)),
    (f"{_PYTORCH}, 8 B200", "harness not stated", "gpqa_diamond", _LARGE, (65.3, None, None)),
    (
        "InferenceX, vLLM on one H200",
        "lm_eval with our prompt and temperature 0, at most 8,192 tokens, effort left at its default",
        "gsm8k",
        _LARGE,
        (None, 95.4, None),
    ),
    (
        "InferenceX, vLLM on 8 H100",
        "lm_eval with our prompt and temperature 0, at most 8,192 tokens, effort left at its default",
        "gsm8k",
        _LARGE,
        (None, 94.8, None),
    ),
    (
        "vLLM's CI (another prompt)",
        "5 examples in a chat, last number of the answer, at most 2,048 tokens, effort left at its default",
        "gsm8k",
        _SMALL,
        (None, 89.9, None),
    ),
    (
        "vLLM #42454",
        "bfcl_eval through Chat Completions, effort left at its default",
        "bfcl_multi_turn",
        _LARGE,
        (None, 56.75, None),
    ),
    (
        "TIGER-Lab's leaderboard (another prompt)",
        "script of General-Reasoner, without examples",
        "mmlu_pro",
        _SMALL,
        (None, 73.1, None),
    ),
)
TABLE = tuple(
    Published(task, model, effort, round(percent / 100, 4), source, _COUNTS[task], settings)
    for source, settings, task, model, percents in _ROWS
    for effort, percent in zip(_EFFORTS, percents, strict=True)
    if percent is not None
)
# The published weights, by a hub id, a short name, a folder or a place in the hub's cache; no fine-tunes.
_MODEL = re.compile(r"(?:^|/|--)(gpt-oss-(?:20b|120b))(?=$|/)")


def lookup(model: str, task: str, effort: str) -> list[Published]:
    """Returns the published scores of a model (an id, a path or a name) at a task and effort.

    Any effort but these three stands for the model's default, medium.
    """
    found = _MODEL.search(model.lower())
    wanted = (found.group(1) if found else "", task, effort if effort in _EFFORTS else "medium")
    return [one for one in TABLE if (one.model, one.task, one.effort) == wanted]
