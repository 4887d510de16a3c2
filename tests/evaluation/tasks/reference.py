"""Grades texts by the code of gpt_oss.evals and lm-evaluation-harness: JSON cases in, verdicts out, by line.

Runs in an environment that has both (``sh tests/acceptance/clients/install.sh FOLDER graders``).
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path

import langdetect
import numpy
import yaml
from gpt_oss.evals.abcd_grader import extract_abcd
from gpt_oss.evals.aime_eval import extract_boxed_text
from lm_eval.api.metrics import exact_match_hf_evaluate
from lm_eval.filters.extraction import RegexFilter
from lm_eval.tasks.ifeval import instructions_util, utils

TASKS = Path(utils.__file__).parents[1]


def task(path):
    """The filters, the metric's arguments and the stop strings of a task's YAML file."""
    with open(TASKS / path, encoding="utf-8") as file:
        # Its tags name functions; the parts read here have none.
        config = yaml.load(re.sub(r"!function \S+", "''", file.read()), yaml.SafeLoader)
    metric = {k: v for k, v in config["metric_list"][0].items() if k.startswith(("ignore", "regexes"))}
    filters = [f["filter"][0] for f in config["filter_list"]]
    for one in filters:
        del one["function"]
    filters = [RegexFilter(**one) for one in filters]
    return filters, metric, config["generation_kwargs"]["until"]


def gsm8k():
    """The harness's own file; InferenceX's copy takes the last match in both filters and has more stops."""
    filters, metric, _ = task("gsm8k/gsm8k.yaml")
    filters[0].group_select = -1
    return (
        filters,
        metric,
        ["</s>", "<|im_end|>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "\u202e"],
    )


def by_filters(case, filters, metric, until):
    text = case["text"]
    for stop in until:
        text = text.split(stop)[0]
    found = [f.apply([[text]], [{}])[0][0] for f in filters]
    right = [
        bool(exact_match_hf_evaluate(predictions=[x], references=[case["target"]], **metric)["exact_match"])
        for x in found
    ]
    return [found, right]


def aime25(case):
    found = extract_boxed_text(case["text"])
    try:
        number = int(found)
    except (ValueError, TypeError):
        number = None
    return [found, number == case["target"]]


def ifeval(case):
    names = [name for name, _ in case["instructions"]]
    example = utils.InputExample(0, names, "", [arguments for _, arguments in case["instructions"]])
    langdetect.DetectorFactory.seed = 0
    strict = utils.test_instruction_following_strict(example, case["text"]).follow_instruction_list
    loose = utils.test_instruction_following_loose(example, case["text"]).follow_instruction_list
    words = instructions_util.nltk.word_tokenize(case["text"])
    return {
        "strict": "".join("01"[x] for x in strict),
        "loose": "".join("01"[x] for x in loose),
        "sentences": instructions_util.count_sentences(case["text"]),
        "words": instructions_util.count_words(case["text"]),
        "capitals": sum(word.isupper() for word in words),
    }


def main(output):
    numpy.seterr(all="raise")
    harness = {
        "gsm8k": gsm8k(),
        "mmlu": task("llama3/instruct/mmlu_cot/_mmlu_cot_llama_template_yaml"),
        "mmlu_pro": task("mmlu_pro/_default_template_yaml"),
    }
    graders = {"abcd": lambda case: extract_abcd(case["text"]), "aime25": aime25, "ifeval": ifeval}
    for line in sys.stdin:
        case = json.loads(line)
        kind = case["kind"]
        verdict = by_filters(case, *harness[kind]) if kind in harness else graders[kind](case)
        print(json.dumps(verdict), file=output)


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        main(sys.__stdout__)
