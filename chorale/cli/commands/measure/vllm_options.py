"""Options of ``vllm bench`` that do nothing here: a note, or an error for one that is refused."""

from __future__ import annotations

import argparse
from typing import Any

from chorale.config.options.vllm_flags import Name, flag_of, read_names
from chorale.errors import ConfigError


class VllmOption(argparse.Action):
    """Prints a note, or raises ``ConfigError``. The namespace does not get the value."""

    def __init__(self, option_strings: list[str], dest: str, line: Name) -> None:
        self.flag = flag_of(line)
        count: Any = {"bool": 0, "list": "*"}.get(self.flag.kind)
        super().__init__(option_strings, dest, nargs=count, default=argparse.SUPPRESS, help=argparse.SUPPRESS)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if not self.flag.asks(values):
            return
        shown, why = f"--{self.flag.name}", self.flag.note
        if self.flag.effect == "refused":
            raise ConfigError(f"{shown} is not supported: {why}")
        effect = "not needed" if self.flag.effect == "not needed" else "has no effect"
        print(f"note: {shown} is accepted and {effect}: {why}")


def add_vllm_options(made: argparse.ArgumentParser, benchmark: str) -> None:
    """Adds the options of ``vllm bench BENCHMARK`` that do nothing here."""
    for line in read_names(f"bench {benchmark}"):
        if line.treatment != "acts":
            made.add_argument(f"--{line.name}", action=VllmOption, line=line)
