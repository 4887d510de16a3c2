"""The checks, in the order in which they run. The command and the report read this table."""

from __future__ import annotations

from chorale.errors import ConfigError, install_hint
from chorale.measure.selfcheck.check import REPORT, Check

_AGAIN = "download the checkpoint again"
CHECKS = (
    Check("shapes", "device", "device.files", 120,
          "every tensor has the expected name, type and shape, and the constants are gpt-oss's",
          f"{_AGAIN} (chorale pull); for an intended variant: --skip shapes"),
    Check("checksums", "device", "device.files", 900, "the files equal the published ones byte for byte",
          "delete the named file and download it again (chorale pull)", quick=False),
    Check("values", "device", "device.files", 600,
          "no parameter is NaN, infinite, absurdly large or constant, no scale is NaN, no file has holes",
          f"{_AGAIN}; if it was converted, convert it again", quick=False),
    Check("answers", "device", "device.logprobs", 180,
          "the model's code, on the demo's weights, gives the same log-probabilities as transformers",
          "delete the demo's folder in ~/.cache/chorale (it is created again), or reinstall: "
          + install_hint()),
    Check("kernels", "device", "device.kernels", 900,
          "each op that the engine would use equals the reference in float32, in every layer",
          f"try another GPU of the same kind: if only this one fails, have it replaced; else {REPORT}"),
    Check("start", "server", "run", 1200, "a server starts with these options",
          "read the message; chorale fit says what fits this machine"),
    Check("harmony", "server", "serving.harmony", 60, "texts and a chat are encoded to the published ids"),
    Check("stops", "server", "serving.harmony", 120,
          "stop tokens and stop strings end an answer and do not appear in it"),
    Check("grammar", "server", "serving.harmony", 180,
          "answers under a JSON Schema or a regular expression match it"),
    Check("record", "server", "serving.record", 600,
          "the engine gives log-probabilities and samples tokens, for the checks sampling and logprobs",
          "read the message and the server's log"),
    Check("sampling", "after", "device.sampling", 60,
          "tokens are sampled as specified: greedily, by seed and at several temperatures"),
    Check("logprobs", "after", "device.logprobs", 1200,
          "the server's log-probabilities equal the reference in float32, except for rounding",
          "if the check kernels passed, find the setting with chorale eval parity (speculation, KV cache,"
          f" ranks) and {REPORT}"),
)  # fmt: skip
NAMES = tuple(check.name for check in CHECKS)


def select(only: str, skip: str, *, quick: bool) -> tuple[Check, ...]:
    """Returns the checks to run. ``only``, ``skip``: names, separated by commas. Raises ``ConfigError``.

    "start" runs if a check needs the server; "sampling" and "logprobs" need "record".
    """
    wanted, unwanted = _names("--only", only), _names("--skip", skip)
    chosen = {
        check.name
        for check in CHECKS
        if (check.name in wanted if wanted else check.quick or not quick) and check.name not in unwanted
    }
    if not chosen:
        raise ConfigError("--only, --skip and --quick leave no check to run")
    if chosen & {"logprobs", "sampling"} and wanted:
        chosen.add("record")
    if any(check.stage == "server" and check.name in chosen for check in CHECKS):
        chosen.add("start")
    return tuple(check for check in CHECKS if check.name in chosen)


def _names(option: str, given: str) -> set[str]:
    found = {name.strip() for name in given.split(",") if name.strip()}
    if unknown := found - set(NAMES):
        raise ConfigError(f"{option} {', '.join(sorted(unknown))}: not one of {', '.join(NAMES)}")
    return found
