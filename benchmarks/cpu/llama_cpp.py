"""Measures llama.cpp on a CPU as ``benchmarks.offline`` measures Chorale, or compares the accuracy of both.

    python -m benchmarks.cpu.gguf FOLDER FILE.gguf
    python -m benchmarks.cpu.llama_cpp FILE.gguf [--num-threads 2]
    python -m benchmarks.cpu.llama_cpp --accuracy FOLDER FILE.gguf...

It calls ``llama_cpp.Llama`` for cases of one row. Tokens are chosen greedily, the cheapest way for llama.cpp.
``--accuracy`` gives one text of random tokens to Chorale and to llama.cpp, and compares the log-probabilities
of its tokens with those of the reference in float32. Needs ``llama-cpp-python``.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.offline import Case, line, measure

try:
    from llama_cpp import Llama
except ImportError:
    raise SystemExit("llama.cpp is measured through llama-cpp-python: pip install llama-cpp-python") from None

CASES = [Case.read(text) for text in ("1:75:1", "1:512:1", "1:2000:1", "1:8:65")]
CHORALE: dict[str, dict[str, Any]] = {
    f"chorale {precision}, {pages} pages": {"ops": "cpu", "cpu_precision": precision, "kv_cache_dtype": pages}
    for precision in ("int8", "exact")
    for pages in ("bfloat16", "float32")
}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("files", type=Path, nargs="+", metavar="FILE.gguf")
    options.add_argument("--num-threads", type=int, default=os.cpu_count())
    options.add_argument("--cases", type=Case.read, nargs="+", default=CASES)
    options.add_argument(
        "--accuracy", type=Path, metavar="FOLDER", help="checkpoint that the files were made from"
    )
    options.add_argument("--tokens", type=int, default=128, help="tokens of the text for --accuracy")
    given = options.parse_args()
    settings = {
        "n_threads": given.num_threads,
        "n_threads_batch": given.num_threads,
        "n_batch": 2048,
        "n_ubatch": 512,  # prompt tokens computed at once
        "flash_attn": True,
        "swa_full": False,  # window layers keep only their window, as in llama-server
        "verbose": False,
    }
    if given.accuracy is not None:
        compare(given.accuracy, given.files, Case(1, given.tokens, 1).prompts()[0], settings)
        return
    for file in given.files:
        began = time.perf_counter()
        llama = Llama(str(file), n_ctx=4096, **settings)
        print(f"start               {time.perf_counter() - began:8.2f} s, {file}")
        for case in given.cases:
            print(line(asdict(case) | measure(partial(seconds, llama, case.prompts()[0]), case, runs=1)))
        print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9:.1f} GB")
        llama.close()


def seconds(llama: Llama, prompt: list[int], tokens: int) -> float:
    """Returns the seconds of one request."""
    llama.reset()  # otherwise a prefix shared with the last prompt would be reused
    began = time.perf_counter()
    made = sum(1 for _ in islice(llama.generate(prompt, temp=0.0), tokens))
    assert made == tokens
    return time.perf_counter() - began


def compare(folder: Path, files: list[Path], text: list[int], settings: dict[str, Any]) -> None:
    """Prints errors of log-probabilities, in nats and as a fraction of the reference's standard deviation."""
    exact = chorale_logprobs(folder, text, ops="reference", dtype="float32")
    print(f"{len(exact)} tokens; standard deviation of the reference's log-probabilities {exact.std():.3f}")
    print(f"{'':40} {'mean':>8} {'worst':>8} {'rms / std':>10}")
    for name, found in others(folder, files, text, settings):
        apart = np.abs(found - exact)
        share = math.sqrt((apart**2).mean()) / exact.std()
        print(f"{name:40} {apart.mean():8.4f} {apart.max():8.4f} {share:10.2%}", flush=True)


def others(
    folder: Path, files: list[Path], text: list[int], settings: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    for name, options in CHORALE.items():
        yield name, chorale_logprobs(folder, text, **options)
    for file in files:
        yield f"llama.cpp {file.name}", llama_logprobs(file, text, settings)


def chorale_logprobs(folder: Path, text: list[int], **options: Any) -> np.ndarray:
    """Returns the log-probabilities of the text's tokens, from the second on."""
    from chorale import LLM, SamplingParams  # imports torch, which must not count as memory of llama.cpp

    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with LLM(str(folder), device="cpu", max_model_len=len(text) + 16, **options) as llm:
        [output] = llm.generate([{"prompt_token_ids": text}], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    entries = zip(output.prompt_logprobs[1:], text[1:], strict=True)
    return np.array([entry[token].logprob for entry, token in entries if entry is not None])


def llama_logprobs(file: Path, text: list[int], settings: dict[str, Any]) -> np.ndarray:
    llama = Llama(str(file), n_ctx=len(text) + 16, logits_all=True, **settings)
    llama.eval(text)
    logits = llama.scores[: len(text) - 1].astype(np.float64)
    llama.close()
    highest = logits.max(axis=1)
    total = highest + np.log(np.exp(logits - highest[:, None]).sum(axis=1))
    return logits[np.arange(len(logits)), text[1:]] - total


if __name__ == "__main__":
    main()
