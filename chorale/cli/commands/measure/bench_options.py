"""The options of ``chorale bench latency | throughput | startup | kernels | make-checkpoint | report``."""

from __future__ import annotations

import os
from pathlib import Path

from chorale.cli.commands.measure.vllm_options import add_vllm_options
from chorale.config.model_names import SIZES
from chorale.config.options.parser import Parser
from chorale.errors import ConfigError
from chorale.machine.hardware import cpu_count
from chorale.model.config_writer import SHAPES

OTHERS = "Also takes MODEL and all options of chorale serve."


def _parser(name: str, about: str, words: str = "[options]") -> Parser:
    made = Parser(f"chorale bench {name}", usage=f"chorale bench {name} {words}", description=about)
    add_vllm_options(made, name)
    return made


def _lengths(made: Parser, input_len: int, output_len: int) -> None:
    made.add_argument("--input-len", type=int, default=input_len, help="prompt length in tokens")
    made.add_argument("--output-len", type=int, default=output_len, help="output length in tokens")
    made.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    made.add_argument("--seed", type=int, default=0)
    _output(made)


def _output(made: Parser) -> None:
    made.add_argument(
        "--output-json", "--json", dest="json", type=_result_file, help="file to write the result to"
    )


def _result_file(text: str) -> Path:
    """Returns the path. Raises ``ConfigError`` if it is not writable, before anything is measured."""
    path = Path(text)
    target = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(target, os.W_OK):
        raise ConfigError(f"--output-json {path}: cannot be written to")
    return path


def latency_parser() -> Parser:
    made = _parser("latency", f"One batch through the engine, without HTTP, several times. {OTHERS}")
    made.add_argument("--batch-size", type=int, default=8, help="concurrent requests")
    made.add_argument(
        "--num-iters-warmup", type=int, default=1, help="runs before the measurement, not counted"
    )
    made.add_argument("--num-iters", type=int, default=3, help="measured runs")
    _lengths(made, 32, 128)
    return made


def throughput_parser() -> Parser:
    made = _parser("throughput", f"Many requests through the engine at once, without HTTP. {OTHERS}")
    made.add_argument("--num-prompts", type=int, default=1000, help="requests")
    _lengths(made, 1024, 128)
    return made


def startup_parser() -> Parser:
    made = _parser("startup", f"Start-up to the first token, with empty and with filled caches. {OTHERS}")
    made.add_argument("--num-iters-cold", type=int, default=1, help="starts with empty caches")
    made.add_argument("--num-iters-warm", type=int, default=3, help="starts with filled caches")
    made.add_argument("--timeout", type=float, default=600.0, help="seconds allowed for one start")
    _output(made)
    return made


def kernels_parser() -> Parser:
    made = _parser(
        "kernels", "Time each Triton kernel at gpt-oss's sizes, with random weights, inside a CUDA graph."
    )
    made.add_argument("--model", choices=SIZES, default="20b", help="model size")
    made.add_argument("--batch-sizes", default="1,8,64,256,1024", help="numbers of rows")
    made.add_argument("--context", type=int, default=1024, help="cached tokens of each row")
    made.add_argument("--layers", type=int, default=8, help="layers of weights, enough to exceed every cache")
    made.add_argument("--peak-tb-s", type=float, default=4.62, help="measured read bandwidth of this GPU")
    made.add_argument("--peak-tflop-s", type=float, default=694.0, help="measured bf16 rate of this GPU")
    _output(made)
    return made


def make_checkpoint_parser() -> Parser:
    made = _parser(
        "make-checkpoint",
        "Write random weights in the published layout, for measuring speed only.",
        "{20b,120b,puzzle-88b} FOLDER [options]",
    )
    made.add_argument("size", choices=sorted(SHAPES, key=len), help="model size")
    made.add_argument("folder", type=Path, metavar="FOLDER", help="a new or empty folder")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    made.add_argument("--threads", type=int, default=min(12, cpu_count()), help="writer threads")
    return made


def report_parser() -> Parser:
    made = _parser(
        "report",
        "Render result files (--save-result, --output-json) as one self-contained HTML page.",
        "RESULT... [options]",
    )
    made.add_argument("results", nargs="+", type=Path, metavar="RESULT", help="JSON result files")
    made.add_argument("--out", type=Path, default=Path("report.html"), help="the HTML file to write")
    return made


PARSERS = {
    "latency": latency_parser,
    "throughput": throughput_parser,
    "startup": startup_parser,
    "kernels": kernels_parser,
    "make-checkpoint": make_checkpoint_parser,
    "report": report_parser,
}
