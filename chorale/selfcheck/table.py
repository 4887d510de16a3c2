"""The checks, in the order in which they run: the one table that command, docs and report are made from."""

from __future__ import annotations

from chorale.errors import ConfigError, install_hint
from chorale.selfcheck.check import Check

_REPORT = "report it, with the output of --json"
_GPU = f"try another GPU of the same kind: if this one alone fails, have it replaced; else {_REPORT}"
_SETTINGS = (
    "if kernels is green, find the setting with chorale eval parity (speculation, KV cache, ranks) and "
    f"{_REPORT}"
)

CHECKS = (
    Check(
        "shapes",
        "files",
        "every tensor is there with its name, type and shape, and the constants are gpt-oss's",
        "download the checkpoint again (chorale pull); for a variant meant to differ: --skip shapes",
        120,
    ),
    Check(
        "checksums",
        "files",
        "the files are byte for byte what was published",
        "delete the file that is named and download it again (chorale pull)",
        900,
        quick=False,
    ),
    Check(
        "values",
        "files",
        "no parameter is NaN, infinite, absurdly large or constant, no scale is NaN, no file has holes",
        "download the checkpoint again; if it was converted, convert it again",
        600,
        quick=False,
    ),
    Check(
        "answers",
        "files",
        "the demo's weights give the log-probabilities that were shipped with this package",
        "delete the demo's folder in ~/.cache/chorale (it is written anew), or install anew: "
        + install_hint(),
        120,
    ),
    Check(
        "kernels",
        "device",
        "each op that the engine would use computes, in every layer, what float32 arithmetic does",
        _GPU,
        900,
    ),
    Check(
        "attention",
        "device",
        "attention gives needles at 1k to 128k tokens their exact weight, at edges of blocks and window",
        _GPU,
        300,
    ),
    Check(
        "sampling",
        "device",
        "tokens are drawn as specified: greedy, by seed, under masks, and as often as they should be",
        _GPU,
        300,
    ),
    Check(
        "start",
        "server",
        "a server starts with these options",
        "read the message; chorale fit says what fits this machine",
        1200,
    ),
    Check(
        "harmony",
        "server",
        "a chat is rendered to the published format and reads back as what was sent",
        _REPORT,
        60,
    ),
    Check("stops", "server", "stop tokens and stop strings end an answer and are not in it", _REPORT, 120),
    Check(
        "tools",
        "server",
        "a required call is made with arguments that fit, and its result is taken",
        _REPORT,
        180,
    ),
    Check("grammar", "server", "answers under a JSON Schema or a regular expression match it", _REPORT, 180),
    Check(
        "record",
        "server",
        "the engine scores texts, alone and in batches; logprobs compares the scores",
        "read the message and the server's log",
        600,
    ),
    Check(
        "needle",
        "server",
        "trained weights find a number that is hidden in 1k to 128k tokens",
        "if kernels, attention and logprobs are green, suspect the checkpoint: see checksums",
        900,
        quick=False,
    ),
    Check(
        "disconnects",
        "server",
        "200 clients that leave early leave no request and no KV block behind",
        _REPORT,
        240,
    ),
    Check(
        "memory",
        "server",
        "the KV pool can be filled: nothing fails, and all of it is free afterwards",
        "lower --gpu-memory-utilization; find what else uses the device: nvidia-smi",
        420,
        quick=False,
    ),
    Check(
        "kill",
        "server",
        "an engine that is killed ends its streams with an error, returns, and answers as before",
        "read the server's log",
        900,
        quick=False,
    ),
    Check(
        "logprobs",
        "after",
        "what the server answered is what float32 arithmetic on the same checkpoint gives, but for rounding",
        _SETTINGS,
        1200,
    ),
)
NAMES = tuple(check.name for check in CHECKS)


def select(only: str, skip: str, *, quick: bool) -> tuple[Check, ...]:
    """Returns the checks to run. ``only``, ``skip``: names, separated by commas. Raises ``ConfigError``.

    "start" runs if a check needs the server; "logprobs" needs "record".
    """
    wanted, unwanted = _names("--only", only), _names("--skip", skip)
    chosen = {
        check.name
        for check in CHECKS
        if (check.name in wanted if wanted else check.quick or not quick) and check.name not in unwanted
    }
    if not chosen:
        raise ConfigError("--only, --skip and --quick leave no check to run")
    if chosen & {"logprobs", "needle"} and wanted:
        chosen.add("record")
    if any(check.place == "server" and check.name in chosen for check in CHECKS):
        chosen.add("start")
    return tuple(check for check in CHECKS if check.name in chosen)


def _names(option: str, given: str) -> set[str]:
    found = {name.strip() for name in given.split(",") if name.strip()}
    if unknown := found - set(NAMES):
        raise ConfigError(f"{option} {', '.join(sorted(unknown))}: not one of {', '.join(NAMES)}")
    return found
