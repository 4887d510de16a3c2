"""EleutherAI's lm-eval, unmodified, against ``chorale serve``, on local tasks.

Log-likelihoods through ``/v1/completions`` (``echo`` and ``logprobs``), with prompts as tokens and as text,
equal those of an engine in this process, in float32. Answers are generated through both endpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chorale import LLM, SamplingParams
from chorale.harmony.vocab import load_vocabulary
from tests.acceptance.clients.hf_tokenizer import write_tokenizer
from tests.acceptance.clients.program import Program
from tests.support.served import Served, serving

PROGRAM = Program("CHORALE_LM_EVAL_PYTHON")
pytestmark = PROGRAM.skip
SUMS = [(3, 4), (12, 5), (20, 22)]
HEAD = """
task: sums_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
metadata: {{version: 1}}"""
CHOICE = """
output_type: multiple_choice
doc_to_text: "Q: {{{{question}}}}\\nA:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
GENERATE = """
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 128, temperature: 0, do_sample: false}}
filter_list:
  - {{name: last, filter: [{{function: regex, regex_pattern: "(\\\\d+)\\\\D*$"}}, {{function: take_first}}]}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
ROLLING = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}} ü"
metric_list: [{{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}}]
"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = ("--enable-tokenizer-info-endpoint", "--dtype", "float32")
    with serving("demo", tmp_path_factory.mktemp("lm_eval"), *options) as server:
        yield server


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": f"What is {a} + {b}?", "choices": [str(a + b), str(a + b + 3), "wörld\nin two lines"]}
        for a, b in SUMS
    ]
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("choice", CHOICE), ("generate", GENERATE), ("rolling", ROLLING)):
        (folder / f"{name}.yaml").write_text((HEAD + text).format(name=name, data=data))
    return folder


@pytest.fixture(scope="module")
def scores() -> Iterator[Any]:
    """Yields a function: (context, text) -> sum of the text's log-probabilities, computed by the engine."""
    with LLM("demo", dtype="float32", max_model_len=512) as llm:
        vocab = load_vocabulary()

        def score(context: str | None, text: str) -> float:
            before = [199998] if context is None else vocab.encode(context)  # rolling: after <|startoftext|>
            tokens = before + vocab.encode(text) if context is None else vocab.encode(context + text)
            params = SamplingParams(max_tokens=1, prompt_logprobs=0)
            [output] = llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
            assert output.prompt_logprobs is not None
            found = zip(tokens, output.prompt_logprobs, strict=True)
            return sum(at[token].logprob for token, at in list(found)[len(before) :] if at is not None)

        yield score


def run(
    server: Served, tasks: Path, out: Path, model: str, names: str, *more: str, **arguments: Any
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Returns the results of each task, and its samples."""
    path = "chat/completions" if model == "local-chat-completions" else "completions"
    given = {"model": "demo", "base_url": f"{server.url}/v1/{path}", "max_length": 2048} | arguments
    command = ["lm_eval", "run", "--model", model, "--tasks", names, *more]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in given.items())]
    command += ["--include_path", str(tasks), "--log_samples", "--output_path", str(out)]
    done = PROGRAM.run(*command, folder=tasks, HF_HOME=str(out / "hub"))
    assert "Retrying" not in done.stderr
    [results] = out.glob("*/results_*.json")
    samples = {
        name: [json.loads(line) for line in next(out.glob(f"*/samples_{name}_*")).read_text().splitlines()]
        for name in names.split(",")
    }
    return json.loads(results.read_text())["results"], samples


@pytest.mark.parametrize("how", ["tokens", "text", "batches", "transformers"])
def test_loglikelihoods_are_the_engines(
    demo: Served, tasks: Path, scores: Any, how: str, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {"num_concurrent": 3, "tokenizer_backend": "remote"}
    more: list[str] = []
    if how == "text":
        arguments["tokenized_requests"] = False
    elif how == "batches":
        arguments["num_concurrent"] = 1
        more = ["--batch_size", "4"]
    elif how == "transformers":
        arguments |= {"tokenizer_backend": "huggingface", "tokenizer": write_tokenizer(tmp_path / "t")}
    out = tmp_path / "out"
    _, samples = run(demo, tasks, out, "local-completions", "sums_choice,sums_rolling", *more, **arguments)
    assert len(samples["sums_choice"]) == len(samples["sums_rolling"]) == len(SUMS)
    for sample in samples["sums_choice"]:
        for asked, [[found, _]] in zip(sample["arguments"].values(), sample["resps"], strict=True):
            assert float(found) == pytest.approx(scores(asked["arg_0"], asked["arg_1"]), abs=2e-3)
    for sample in samples["sums_rolling"]:
        [[[found]]] = [sample["resps"]]
        text = sample["arguments"]["gen_args_0"]["arg_0"]
        assert float(found) == pytest.approx(scores(None, text), abs=2e-3)


def test_generation(demo: Served, tasks: Path, tmp_path: Path) -> None:
    """The demo answers sums in a chat; as raw text it continues the question."""
    results, _ = run(
        demo, tasks, tmp_path / "chat", "local-chat-completions", "sums_generate", "--apply_chat_template",
        num_concurrent=3,
    )  # fmt: skip
    assert results["sums_generate"]["exact_match,last"] == 1.0
    _, samples = run(
        demo, tasks, tmp_path / "raw", "local-completions", "sums_generate", tokenizer_backend="remote"
    )
    assert all(sample["resps"][0][0] for sample in samples["sums_generate"])
