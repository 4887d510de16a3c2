"""The list of vLLM's names: each has a treatment, and the product treats it so."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from chorale.api.chat import request as chat
from chorale.api.completions import request as completions
from chorale.api.messages import request as messages
from chorale.api.operations import OPERATIONS
from chorale.api.operator import tokenize
from chorale.api.responses import request as responses
from chorale.api.telemetry.engine_metrics import ENGINE_METRICS
from chorale.api.telemetry.metric_names import COUNTERS, HISTOGRAMS
from chorale.cli.commands.measure import bench_options
from chorale.cli.commands.measure.bench import BENCHES
from chorale.cli.commands.measure.vllm_options import VllmOption
from chorale.config.options.flags import ALIASES, FLAGS
from chorale.config.options.settings import merge
from chorale.config.options.vllm_flags import SHORT_FLAGS, Name, read_names
from chorale.errors import ConfigError
from chorale.llm import llm, params
from tests.deploy.files import load_script

LINES = read_names()
TREATMENTS = ("acts", "not needed", "no effect", "refused")
# A value of the right form.
VALUES = {"bool": [], "json": ['{"a": 1}'], "list": ["a", "b"]}
# Variables that a library or the driver reads, and paths that some servers have.
READ_ELSEWHERE = ("CUDA_VISIBLE_DEVICES", "NO_COLOR", "FORCE_COLOR")
OPTIONAL_PATHS = ("GET /docs", "GET /tokenizer_info")
TOKENIZE = {**chat.ChatRequest.model_fields, **tokenize.Shown.model_fields}
FIELDS: dict[str, tuple[Collection[str], Collection[str]]] = {  # honoured, refused
    "field chat": (chat.ChatRequest.model_fields, chat.REFUSED),
    "field completions": (completions.CompletionRequest.model_fields, completions.REFUSED),
    "field responses": (responses.ResponsesRequest.model_fields, responses.REFUSED),
    "field messages": (messages.MessagesRequest.model_fields, messages.REFUSED),
    "field tokenize": (TOKENIZE, chat.REFUSED),
    "field detokenize": (tokenize.DetokenizeRequest.model_fields, ()),
}


def merged(arguments: list[str], environment: dict[str, str]) -> str:
    """Returns how a flag or variable is treated, by the notices that it causes."""
    try:
        notices = merge(arguments, environment).notices
    except ConfigError as error:
        return "refused" if "is not supported: " in str(error) else str(error)
    words = {
        "not needed": "not needed",
        "has no effect": "no effect",
        "not read by": "no effect",
        "visible in process lists; prefer": "acts",
    }
    assert len(notices) <= 1, notices
    found = (next((kind for word, kind in words.items() if word in text), text) for text in notices)
    return next(found, "acts")


def flag(line: Name) -> str:
    found = FLAGS.get(ALIASES.get(line.name, line.name))
    if found is None or found.target is not None:
        return "unknown" if found is None else "acts"
    return merged([f"--{line.name}", *VALUES.get(found.kind, ["17"])], {})


def variable(line: Name) -> str:
    read = {name for each in FLAGS.values() for name in each.environment}
    if line.name in read or line.name in READ_ELSEWHERE:
        return "acts"
    found = merged([], {line.name.replace("*", "_X"): "1"})
    return found if found != "acts" else "no effect" if "silent" in line.form else "no notice"


def endpoint(line: Name) -> str:
    served = {f"{each.method.upper()} {each.path}" for each in OPERATIONS}
    return "acts" if line.name in served or line.name in OPTIONAL_PATHS else "refused"


def field(line: Name) -> str:
    honoured, refused = FIELDS[line.kind]
    return "refused" if line.name in refused else "acts" if line.name in honoured else "no effect"


def method(line: Name) -> str:
    return "acts" if hasattr(llm.LLM, line.name) else "refused"


def sampling(line: Name) -> str:
    meanings = {name: meaning for name, _, _, meaning in params.sampling_arguments()}
    if line.name in meanings:
        return "no effect" if "no effect" in meanings[line.name] else "acts"
    try:
        params.SamplingParams(**{line.name: 7})
    except (TypeError, ValueError) as error:
        return "refused" if line.name in str(error) else str(error)
    return "unknown"


def metric(line: Name) -> str:
    return (
        "acts"
        if line.name in {*COUNTERS, *HISTOGRAMS, *(each.name for each in ENGINE_METRICS)}
        else "not needed"
    )


def benchmark(line: Name) -> str:
    name = line.kind.removeprefix("bench ")
    if name not in BENCHES:
        return "refused"
    made = bench_options.PARSERS[name]()
    [action] = [each for each in made._actions if f"--{line.name}" in each.option_strings]
    if not isinstance(action, VllmOption):
        return "acts"
    value = VALUES.get(line.form.split()[0], ["17"])
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            made.parse_known_args([f"--{line.name}", *value])
    except ConfigError as error:
        return "refused" if "is not supported: " in error.message else error.message
    words = {"accepted and not needed": "not needed", "accepted and has no effect": "no effect"}
    return next((kind for text, kind in words.items() if text in printed.getvalue()), "no note")


PRODUCT: dict[str, Callable[[Name], str]] = {
    "flag": flag, "env": variable, "endpoint": endpoint, **dict.fromkeys(FIELDS, field), "LLM": method,
    "SamplingParams": sampling, "metric": metric,
    **dict.fromkeys((line.kind for line in LINES if line.kind.startswith("bench ")), benchmark),
}  # fmt: skip


def test_each_name_has_a_treatment_and_a_reason() -> None:
    """A new name of vLLM has none. Fields and parameters have their reasons in the product's tables."""
    bare = [f"{line.kind} {line.name}" for line in LINES if line.treatment not in TREATMENTS]
    elsewhere = ("field ", "SamplingParams")
    bare += [
        f"{line.kind} {line.name}: no reason"
        for line in LINES
        if line.treatment != "acts" and not line.reason and not line.kind.startswith(elsewhere)
    ]
    assert not bare, "write their treatment and reason into chorale/config/options/vllm_names.txt"


def test_each_name_has_one_line() -> None:
    keys = [(line.kind, line.name) for line in LINES]
    assert len(keys) == len(set(keys))


def test_the_list_has_every_kind() -> None:
    assert {line.kind for line in LINES} == {*PRODUCT, "field generate"}


@pytest.mark.parametrize("kind", PRODUCT)
def test_the_product_treats_the_names_as_the_list_says(kind: str) -> None:
    pairs = [(line, PRODUCT[kind](line)) for line in LINES if line.kind == kind]
    wrong = [
        f"{line.name}: {line.treatment!r}, but {found!r}" for line, found in pairs if found != line.treatment
    ]
    assert pairs
    assert not wrong, "\n".join(["listed and found:", *wrong])


def test_a_metric_with_vllms_prefix_is_vllms() -> None:
    ours = {*COUNTERS, *HISTOGRAMS, *(each.name for each in ENGINE_METRICS)}
    listed = {line.name for line in LINES if line.kind == "metric"}
    assert {name for name in ours if not name.startswith("chorale:")} <= listed


def test_a_short_name_is_that_of_one_flag() -> None:
    words = [word for line in LINES if line.kind == "flag" for word in line.form.split() if word[0] == "-"]
    assert len(words) == len(set(words)) == len(SHORT_FLAGS)
    assert SHORT_FLAGS["-tp"] == "tensor-parallel-size"


SAMPLE = {
    "engine/arg_utils.py": """
class EngineArgs:
    @staticmethod
    def add_cli_args(parser):
        kwargs = get_kwargs(SomeConfig)
        group = parser.add_argument_group(title="x")
        group.add_argument("--max-rows", "-mr", **kwargs["max_rows"])
        group.add_argument("--old-name", "--new-name", dest="rows", **kwargs["max_rows"])
        parser.add_argument("--quiet", action="store_true")
""",
    "config/some.py": "class SomeConfig:\n    max_rows: int | None = None\n",
    "entrypoints/common/cli_args.py": """
class BaseFrontendArgs:
    names: list[str] | None = None
    _private: int = 0
class FrontendArgs(BaseFrontendArgs):
    allow_all: bool = False
def make_arg_parser(parser):
    parser.add_argument("--config", help="a file")
""",
    "benchmarks/serve.py": """
def add_cli_args(parser):
    add_dataset_parser(parser)
    parser.add_argument("--goodput", nargs="+")
""",
    "benchmarks/datasets/all.py": 'def add_dataset_parser(p):\n    p.add_argument("--split", type=int)\n',
    "envs.py": 'environment_variables: dict[str, object] = {"VLLM_A": lambda: os.getenv("VLLM_B")}\n',
    "entrypoints/serve/api_router.py": """
@router.post("/sleep", dependencies=[])
async def sleep(): ...
router.add_api_route("/both", f, methods=["GET", "POST"])
data.get("/not-a-route".strip())
class ChatCompletionRequest(Base):
    messages: list
""",
    "entrypoints/llm.py": """
class Mixin:
    def beam_search(self): ...
class LLM(Mixin):
    def __init__(self): ...
    def generate(self): ...
""",
    "sampling_params.py": "class SamplingParams:\n    n: int = 1\n    _x: int = 0\n",
    "v1/metrics/loggers.py": 'gauge(name="vllm:running")\nname.startswith("vllm:spec")\n',
}  # fmt: skip


def test_the_script_finds_the_names_of_a_wheel(tmp_path: Path) -> None:
    for name, text in SAMPLE.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    script = load_script("vllm_names")
    found = script.names_of(tmp_path)
    http = {("metric", name) for name in script.HTTP_METRICS}
    assert {key: form for key, form in found.items() if key not in http} == {
        ("flag", "max-rows"): "int -mr", ("flag", "old-name"): "int", ("flag", "new-name"): "int",
        ("flag", "quiet"): "bool", ("flag", "config"): "str", ("flag", "names"): "list",
        ("flag", "allow-all"): "bool", ("bench serve", "goodput"): "list", ("bench serve", "split"): "int",
        ("env", "VLLM_A"): "", ("endpoint", "POST /sleep"): "", ("endpoint", "GET /both"): "",
        ("endpoint", "POST /both"): "", ("field chat", "messages"): "", ("LLM", "beam_search"): "",
        ("LLM", "generate"): "", ("SamplingParams", "n"): "", ("metric", "vllm:running"): "",
    }  # fmt: skip


def test_the_script_keeps_known_lines_and_marks_what_changed() -> None:
    known = [
        Name("flag", "kept", "int harmless=1", "refused", "why"), Name("flag", "lost", "bool", "acts", ""),
        Name("flag", "back", "bool gone", "acts", ""), Name("env", "VLLM_X_*", "", "no effect", "no X"),
    ]  # fmt: skip
    found = {
        ("flag", "kept"): "int",
        ("flag", "back"): "bool",
        ("flag", "new"): "list",
        ("env", "VLLM_X_Y"): "",
    }
    assert load_script("vllm_names").merged(known, found) == [
        known[0], known[1]._replace(form="bool gone"), known[2]._replace(form="bool"),
        Name("flag", "new", "list", "", ""), known[3], known[3]._replace(name="VLLM_X_Y"),
    ]  # fmt: skip
