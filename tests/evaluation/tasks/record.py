"""Writes verdicts.json.xz: texts of our own with the verdicts of gpt_oss.evals and lm-evaluation-harness.

    CHORALE_GRADERS_PYTHON=... CHORALE_GRADERS_NLTK=... python -m tests.evaluation.tasks.record

The variables are those that ``sh tests/acceptance/clients/install.sh FOLDER graders`` prints.
"""

from __future__ import annotations

import functools
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from chorale.evaluation import samples
from chorale.evaluation.tasks.ifeval.parameters import read_parameters
from chorale.evaluation.tasks.ifeval.punkt import Parameters
from tests.evaluation.tasks.texts import Case, cases

FIXTURE = Path(__file__).with_name("verdicts.json.xz")
_GRADES = Path(__file__).with_name("reference.py")
_PROMPTS = Path(__file__).with_name("reference_prompts.py")
_SAMPLES = Path(samples.__file__).parent


def reference(python: str, nltk_data: str, given: list[Case]) -> list[Any]:
    """Returns the verdicts of the packages in another environment."""
    lines = "".join(json.dumps(case) + "\n" for case in given)
    return [json.loads(line) for line in _run([python, str(_GRADES)], nltk_data, lines).splitlines()]


def prompts(python: str, nltk_data: str) -> dict[str, list[Any]]:
    """Returns what the packages send for the packaged samples, by task."""
    sent: dict[str, list[Any]] = json.loads(_run([python, str(_PROMPTS), str(_SAMPLES)], nltk_data))
    return sent


def _run(command: list[str], nltk_data: str, given: str = "") -> str:
    environment = os.environ | {"NLTK_DATA": nltk_data, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, input=given, capture_output=True, text=True, env=environment, timeout=600)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return done.stdout


def read_prompts() -> dict[str, list[Any]]:
    """Returns the recorded prompts."""
    recorded: dict[str, list[Any]] = _read()["prompts"]
    return recorded


@functools.cache
def _read() -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(lzma.decompress(FIXTURE.read_bytes()))
    return recorded


def read() -> tuple[list[Case], list[Any], Parameters]:
    """Returns the recorded texts, their verdicts, and NLTK's parameters as far as the texts need them."""
    recorded = _read()
    punkt = recorded["punkt"]
    parameters = Parameters(
        frozenset(punkt["abbreviations"]),
        frozenset((a, b) for a, b in punkt["collocations"]),
        frozenset(punkt["starters"]),
        punkt["contexts"],
    )
    return recorded["cases"], recorded["verdicts"], parameters


def _used(parameters: Parameters, given: list[Case]) -> dict[str, Any]:
    """The parameters of the words that occur in the texts: the others change nothing."""
    words = {
        part.strip(".,:;!?\"'()[]{}<>*“”‘’")
        for case in given
        for word in case["text"].lower().split()
        for part in (word, *word.replace("—", "-").split("-"), *word.split("/"))
    }
    words |= {f"{word}." for word in words}
    return {
        "abbreviations": sorted(word for word in parameters.abbreviations if word in words),
        "collocations": sorted(pair for pair in parameters.collocations if pair[1] in words),
        "starters": sorted(parameters.starters & words),
        "contexts": {w: bits for w, bits in sorted(parameters.contexts.items()) if w in words},
    }


def main() -> None:
    python, nltk_data = os.environ["CHORALE_GRADERS_PYTHON"], os.environ["CHORALE_GRADERS_NLTK"]
    given = list(cases())
    verdicts = reference(python, nltk_data, given)
    assert len(verdicts) == len(given)
    parameters = read_parameters(Path(nltk_data, "tokenizers/punkt_tab.zip"))
    recorded = {"cases": given, "verdicts": verdicts, "punkt": _used(parameters, given)}
    recorded["prompts"] = prompts(python, nltk_data)
    FIXTURE.write_bytes(lzma.compress(json.dumps(recorded, ensure_ascii=False).encode(), preset=9))
    print(f"{len(given)} texts, {FIXTURE.stat().st_size:,} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
