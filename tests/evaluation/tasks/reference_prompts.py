"""Prints what gpt_oss.evals and lm-evaluation-harness send for the packaged samples: one JSON object.

    python reference_prompts.py FOLDER_OF_SAMPLES

Runs in an environment that has both (``sh tests/acceptance/clients/install.sh FOLDER graders``).
"""

from __future__ import annotations

import contextlib
import json
import sys
from functools import partial
from pathlib import Path

import lm_eval
import pandas
from gpt_oss.evals import aime_eval, gpqa_eval
from gpt_oss.evals.types import SamplerBase, SamplerResponse
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

TASKS = Path(lm_eval.__file__).parent / "tasks"


class Recorder(SamplerBase):
    """Keeps the messages and answers nothing."""

    def __init__(self):
        self.sent = []

    def _pack_message(self, role, content):
        return {"role": role, "content": content}

    def __call__(self, messages):
        self.sent.append(messages)
        return SamplerResponse("", messages, {})


def by_evals(evaluation):
    recorder = Recorder()
    evaluation(recorder)
    return recorder.sent


def gpqa(folder):
    read = pandas.read_csv
    pandas.read_csv = lambda _: read(folder / "gpqa_diamond/gpqa_diamond.csv")
    return by_evals(gpqa_eval.GPQAEval(n_repeats=8, n_threads=1))


def aime(folder):
    read = pandas.read_json
    pandas.read_json = lambda url, lines: read(folder / "aime25" / Path(url).name, lines=lines)
    return by_evals(aime_eval.AIME25Eval(n_repeats=1, n_threads=1))


def by_harness(config, files, shots):
    config["dataset_path"] = "json"
    config.pop("dataset_name", None)
    config["dataset_kwargs"] = {"data_files": {split: str(path) for split, path in files.items()}}
    task = ConfigurableTask(config=config)
    task.set_fewshot_seed(1234)
    build = partial(
        task.fewshot_context, num_fewshot=shots, apply_chat_template=True, fewshot_as_multiturn=True,
        chat_template=lambda messages, **_: messages,
    )  # fmt: skip
    return [build(doc) for doc in task.test_docs()]


def gsm8k(folder):
    config = load_yaml(TASKS / "gsm8k/gsm8k.yaml")
    # The line in which InferenceX's copy of the file differs.
    config["doc_to_text"] = (
        "Question: {{question}}\nEnd your response with the answer on the last line, "
        "formatted as: #### [number]\nAnswer:"
    )
    files = {split: folder / f"gsm8k/{split}.jsonl" for split in ("test", "train")}
    return by_harness(config, files, 5)


def mmlu(folder):
    config = load_yaml(TASKS / "llama3/instruct/mmlu_cot/mmlu_anatomy.yaml")
    return by_harness(config, {"test": folder / "mmlu/test.jsonl"}, 0)


def mmlu_pro(folder):
    files = {split: folder / f"mmlu_pro/{split}.jsonl" for split in ("test", "validation")}
    return [
        sent
        for category in ("math", "physics")
        for sent in by_harness(load_yaml(TASKS / f"mmlu_pro/mmlu_pro_{category}.yaml"), files, 5)
    ]


def ifeval(folder):
    return by_harness(load_yaml(TASKS / "ifeval/ifeval.yaml"), {"train": folder / "ifeval/train.jsonl"}, 0)


if __name__ == "__main__":
    samples = Path(sys.argv[1])
    tasks = {"gpqa_diamond": gpqa, "aime25": aime, "mmlu": mmlu, "mmlu_pro": mmlu_pro, "gsm8k": gsm8k}
    tasks["ifeval"] = ifeval
    with contextlib.redirect_stdout(sys.stderr):
        sent = {name: function(samples) for name, function in tasks.items()}
    print(json.dumps(sent))
