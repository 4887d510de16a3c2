"""The fenced blocks of README, docs and guides: what each needs, and whether a test runs it.

    python -m tests.docs.blocks          prints the counts, and each block that no test runs with its reason

A comment above a fence says what its language and programs do not:

    <!-- needs: a GPU -->       cannot run with the demo on a CPU
    <!-- prints: 42 -->         its output contains this (once for each comment)
    <!-- status: 404 -->        curl gets this status; without the comment every status is 2xx
    <!-- slow -->               takes seconds of CPU: runs in `make test-all` only
    <!-- file: in.jsonl -->     is saved under this name for the blocks below it
    <!-- output -->             is what the block before it prints
    <!-- answer -->             is the JSON that the block before it prints: the same keys, types and texts
    <!-- events -->             has the names of the events that the block before it prints
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

PAGES = [
    *(page for page in sorted(ROOT.glob("*.md")) if page.name != "CHANGELOG.md"),
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.parent.name not in ("lab", "decisions")),
    *(ROOT / name / "README.md" for name in ("evals", "examples")),
]
FENCE = re.compile(r"((?:^ *<!-- [^\n]* -->\n\s*)*)^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
NOTE = re.compile(r"<!-- (needs|prints|status|slow|file|output|answer|events)(?:: (.*?))? -->")
SHELLS = ("sh", "bash")
DATA = ("json", "yaml", "toml")  # loaded by the test
# What a program in a block needs. One that is neither here nor in RUN fails the test.
NEEDS = {
    **dict.fromkeys(("pip", "uv", "npm", "npx", "make"), "a package registry"),
    **dict.fromkeys(("kubectl", "helm"), "a Kubernetes cluster"),
    **dict.fromkeys(("lm_eval", "inspect", "bfcl", "guidellm"), "an evaluation client"),
    **dict.fromkeys(("ollama", "llama-server", "vllm"), "the server that you move from"),
    **dict.fromkeys(("codex", "claude", "cn", "cline", "litellm", "open-webui"), "the client"),
    **dict.fromkeys(("install", "systemctl"), "systemd and root"),
    **dict.fromkeys(("ray", "serve"), "a Ray cluster"),
    "docker": "Docker",
    "git": "the address of a repository",
    "modal": "an account at Modal",
    "nvidia-smi": "an NVIDIA GPU",
    "pre-commit": "pre-commit",
    "pytest": "nothing more: it is a test itself",
    "sky": "an account at a cloud",
}
RUN = {
    *(".", "base64", "cat", "cd", "chorale", "cp", "curl", "echo", "export", "grep", "head"),
    *("openssl", "python", "python3", "sed", "sh", "source", "wc"),
}
# Commands of chorale that start no engine.
OFFLINE = (
    *("fit", "doctor", "list", "config", "demo", "vocab", "completion", "collect-env"),
    *("--help", "--version"),
)
WEIGHTS = re.compile(r"gpt-oss-\d+b|\b(?:FOLDER|MODEL|TASK)\b")
# Tests and measurements of the project, each with its own place in CI or on a GPU.
SCRIPTS = re.compile(r"python (?:-m (?:pytest|benchmarks|tests|training)\b|(?:scripts|evals|benchmarks)/)")


@dataclass(frozen=True, slots=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    notes: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def note(self, name: str) -> list[str]:
        return [value for key, value in self.notes if key == name]

    @property
    def commands(self) -> list[list[str]]:
        return list(commands(self.text)) if self.language in SHELLS else []

    @property
    def needs(self) -> str | None:
        """What the block needs beyond the demo on a CPU, or None."""
        if said := self.note("needs"):
            return said[0]
        if self.language == "python":
            return _modules(self.text)
        found = {need for command in self.commands if (need := _need(command)) is not None}
        return ", ".join(sorted(found)) or None

    @property
    def state(self) -> str:
        """One of run, slow, checked (loaded, or compared with an output), parsed, excluded, text."""
        if self.language not in (*SHELLS, "python"):
            compared = any(self.note(name) for name in ("output", "answer", "events"))
            if compared or self.language in DATA:
                return "checked"
            return "text" if self.language in ("", "text") else "excluded"
        if self.needs is None:
            return "slow" if self.slow else "run"
        # Command lines of Chorale are read by its own parsers, whatever they need to run.
        ours = self.commands and all(command[0] == "chorale" for command in self.commands)
        return "parsed" if ours else "excluded"

    @property
    def slow(self) -> bool:
        """Whether it starts an engine, a second or more of CPU, or says so."""
        started = any(command[0] == "chorale" and command[1] not in OFFLINE for command in self.commands)
        return bool(started or self.note("slow") or re.search(r"\bLLM\(", self.text))


def commands(text: str) -> Iterator[list[str]]:
    """Yields each command as words, its program without a folder. Raises ``ValueError`` for an open quote."""
    lexer = shlex.shlex(_lines(text), posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split, lexer.commenters = True, ""
    command: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("();|&"):
            if command:
                yield [command[0].rpartition("/")[2], *command[1:]]
            command = []
        elif command or not re.fullmatch(r"\w+=.*|export|if|then|fi|until|do|done|\$", word, re.DOTALL):
            command.append(word)


def _lines(text: str) -> str:
    """The commands of a block, a semicolon after each, without comments."""
    said, pending = "", ""
    for line in text.replace("\\\n", " ").splitlines():
        pending += line
        for mark in re.finditer(r"(?:^|(?<=\s))#", pending):
            if _closed(pending[: mark.start()]):
                pending = pending[: mark.start()]
                break
        if _closed(pending):
            said, pending = said + pending + " ; ", ""
        else:
            pending += "\n"  # a quote goes on in the next line
    if pending:
        raise ValueError(f"an open quote: {pending}")
    return said


def _closed(text: str) -> bool:
    try:
        shlex.split(text)
    except ValueError:
        return False
    return True


def _need(command: list[str]) -> str | None:
    name = command[0]
    if name in NEEDS:
        return NEEDS[name]
    line = " ".join(command)
    if SCRIPTS.match(line):
        return "minutes, or a GPU"
    if name == "chorale":
        return "the weights of gpt-oss" if command[1] not in OFFLINE and WEIGHTS.search(line) else None
    return None if name in RUN else f"{name}, which no table of tests/docs/blocks.py has"


def _modules(text: str) -> str | None:
    """The first package that a Python block imports and this environment lacks."""
    for node in ast.walk(ast.parse(text)):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if importlib.util.find_spec(name.partition(".")[0]) is None:
                return f"the package {name.partition('.')[0]}"
    return None


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    found = []
    for match in FENCE.finditer(text):
        notes, indent, language, body = match.groups()
        line = text.count("\n", 0, match.start(3)) + 1
        said = tuple((name, value or "") for name, value in NOTE.findall(notes))
        body = re.sub(f"^{indent}", "", body, flags=re.MULTILINE)
        found.append(Block(page, line, language, body, said))
    return found


def main() -> None:
    every = [block for page in PAGES for block in blocks(page)]
    for state, count in sorted(Counter(block.state for block in every).items()):
        print(f"{count:5} {state}")
    print(f"{len(every):5} in all")
    for block in every:
        if block.state in ("parsed", "excluded"):
            print(f"{block}: {block.state} {block.language}: needs {block.needs}")


if __name__ == "__main__":
    main()
