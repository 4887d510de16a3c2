"""The options of ``chorale bench latency | throughput | startup | kernels | make-checkpoint | report``."""

from __future__ import annotations

import os
from pathlib import Path

from chorale.cli.parser import Parser
from chorale.errors import ConfigError
from chorale.model.config_writer import SHAPES
from chorale.runtime.hardware import cpu_count

OTHERS = "MODEL and all other options: as for chorale serve."


def _parser(name: str, about: str, words: str = "[options]") -> Parser:
    return Parser(f"chorale bench {name}", usage=f"chorale bench {name} {words}", description=about)


def _lengths(made: Parser, input_len: int, output_len: int) -> None:
    made.add_argument("--input-len", type=int, default=input_len, help="tokens of a prompt")
    made.add_argument("--output-len", type=int, default=output_len, help="tokens of an answer")
    made.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    made.add_argument("--seed", type=int, default=0)
    _output(made)


def _output(made: Parser) -> None:
    made.add_argument(
        "--output-json", "--json", dest="json", type=_result_file, help="where the result is written"
    )


def _result_file(text: str) -> Path:
    """Looked at before anything is measured: afterwards it would be for nothing."""
    path = Path(text)
    place = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(place, os.W_OK):
        raise ConfigError(f"--output-json {path}: cannot be written to")
    return path


def latency_parser() -> Parser:
    made = _parser("latency", f"One batch through the engine, without HTTP, several times. {OTHERS}")
    made.add_argument("--batch-size", type=int, default=8, help="requests at once")
    made.add_argument("--num-iters-warmup", type=int, default=1, help="runs before it counts")
    made.add_argument("--num-iters", type=int, default=3, help="runs that count")
    _lengths(made, 32, 128)
    return made


def throughput_parser() -> Parser:
    made = _parser("throughput", f"Many requests through the engine at once, without HTTP. {OTHERS}")
    made.add_argument("--num-prompts", type=int, default=1000, help="requests")
    _lengths(made, 1024, 128)
    return made


def startup_parser() -> Parser:
    made = _parser("startup", f"From nothing to the first token, caches empty or filled. {OTHERS}")
    made.add_argument("--num-iters-cold", type=int, default=1, help="starts with empty caches")
    made.add_argument("--num-iters-warm", type=int, default=3, help="starts with filled ones")
    made.add_argument("--timeout", type=float, default=600.0, help="seconds that one start may take")
    _output(made)
    return made


def kernels_parser() -> Parser:
    made = _parser("kernels", "Each Triton kernel at gpt-oss's sizes, random weights, inside a CUDA graph.")
    made.add_argument("--model", choices=sorted(SHAPES, key=len), default="20b", help="whose sizes")
    made.add_argument("--batch-sizes", default="1,8,64,256,1024", help="rows")
    made.add_argument("--context", type=int, default=1024, help="tokens in the cache of each row")
    made.add_argument("--layers", type=int, default=8, help="of weights, so that no cache holds them")
    made.add_argument("--peak-tb-s", type=float, default=4.62, help="measured read bandwidth of this GPU")
    made.add_argument("--peak-tflop-s", type=float, default=694.0, help="measured bf16 rate of this GPU")
    _output(made)
    return made


def make_checkpoint_parser() -> Parser:
    made = _parser(
        "make-checkpoint",
        "Random weights, published layout. Says nothing about quality.",
        "{20b,120b} FOLDER [options]",
    )
    made.add_argument("size", choices=sorted(SHAPES, key=len), help="whose sizes")
    made.add_argument("folder", type=Path, metavar="FOLDER", help="new, or empty")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    made.add_argument("--threads", type=int, default=min(12, cpu_count()), help="that write")
    return made


def report_parser() -> Parser:
    made = _parser(
        "report",
        "Result files (--save-result, --output-json) to one self-contained HTML page.",
        "RESULT... [options]",
    )
    made.add_argument("results", nargs="+", type=Path, metavar="RESULT", help="JSON files")
    made.add_argument("--out", type=Path, default=Path("report.html"), help="the page")
    return made
