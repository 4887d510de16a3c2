"""Each fenced block of README and docs: run against one demo server, or loaded, parsed or compared."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from chorale.api.operations import OPERATIONS
from chorale.cli.commands.machine.fit import take_gpus
from chorale.cli.commands.measure.bench import BENCHES
from chorale.cli.completion import PARSERS, _own_parser
from chorale.cli.main import COMMANDS
from chorale.config.options.settings import merge
from tests.docs.blocks import DATA, PAGES, SHELLS, Block, blocks
from tests.docs.python_child import Execute, python_child
from tests.support import PATIENCE, ROOT
from tests.support.served import Served, serving

BY_PAGE = {page: found for page in PAGES if (found := blocks(page))}
GREEDY = ("--override-generation-config", '{"temperature": 0}')
SLOW = [page for page, found in BY_PAGE.items() if any(block.state == "slow" for block in found)]
NAMES = re.compile(r"openai/gpt-oss-\d+b|(?<=[\"'=])gpt-oss-\d+b")
VOLATILE = re.compile(r"(\w+_)*(at|id|created|tokens|fingerprint|bytes|signature)")
IDENTIFIER = re.compile(r"[a-z]+(?:-|_)[0-9a-f]{6,}")


def page_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


pages = pytest.mark.parametrize("page", BY_PAGE, ids=page_of)


@dataclass
class Reader:
    """Someone who pastes the blocks of a page, one after the other, into a terminal and a Python session."""

    server: Served
    folder: Path
    python: Execute
    said: str | None = None  # what the last block printed, or None if it was not run
    ids: dict[str, str] = field(default_factory=dict)  # an id on the page -> the one that the server gave

    def read(self, page: Path, slow: bool) -> None:
        self.said, self.ids = None, {}
        for block in BY_PAGE[page]:
            for name in block.note("file"):
                (self.folder / name).write_text(self.here(block.text))
            if block.state == "run" or (slow and block.state == "slow"):
                self.run(block)
            elif block.state == "checked":
                self.compare(block)
            elif block.state != "text":
                self.said = None

    def here(self, text: str) -> str:
        """The text with this server's address and model, and with its ids."""
        text = text.replace("http://localhost:8000", self.server.url).replace(".venv/bin/", "")
        text = NAMES.sub("demo", text)
        for written, given in self.ids.items():
            text = text.replace(written, given)
        return text

    def run(self, block: Block) -> None:
        if block.language == "python":
            # The reader of this page pastes into one session.
            console = block.page.name == "getting-started.md"
            source = self.here(block.text)
            self.said = self.python(str(block.page), source, self.folder, console=console)
        elif any(command[:2] == ["chorale", "serve"] for command in block.commands):
            self.said = serve_and_ask(block, self.folder)
        else:
            self.said = self.shell(block)
        for text in block.note("prints"):
            assert text in self.said, f"{block} printed {self.said}"

    def shell(self, block: Block) -> str:
        if any(command[0] == "curl" for command in block.commands) and shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        # curl writes the status of each answer to stderr.
        (self.folder / ".curlrc").write_text('silent\nshow-error\nwrite-out = "%{stderr}%{http_code}\\n"\n')
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = {**os.environ, "CURL_HOME": str(self.folder), "PATH": programs, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self.here(block.text)], cwd=self.folder, env=environment,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}: {done.stdout}{done.stderr}"
        statuses = re.findall(r"^(\d{3})$", done.stderr, re.MULTILINE)
        expected = block.note("status")
        assert statuses == expected if expected else all(each[0] == "2" for each in statuses), (
            f"{block}: {done}"
        )
        return done.stdout

    def compare(self, block: Block) -> None:
        if self.said is None:
            return
        if block.note("output"):
            assert self.said.strip() == block.text.strip(), str(block)
        if block.note("answer"):
            self.alike(json.loads(block.text), json.loads(self.said), str(block))
        if block.note("events"):
            names = re.findall(r"^event: (.*)$", block.text, re.MULTILINE)
            assert names == list(dict.fromkeys(re.findall(r"^event: (.*)$", self.said, re.MULTILINE))), str(
                block
            )

    def alike(self, written: Any, given: Any, where: str) -> None:
        """The page's JSON has the answer's keys, types and texts; "..." stands for any value or the rest."""
        if written == "...":
            return
        assert type(written) is type(given), f"{where}: {written!r} on the page, {given!r} here"
        if isinstance(written, dict):
            rest = written.pop("...", None) is not None
            assert written.keys() == given.keys() or (rest and written.keys() < given.keys()), where
            for name in written:
                if VOLATILE.fullmatch(name) and not isinstance(written[name], (str, dict, list)):
                    assert type(written[name]) is type(given[name]), f"{where}: {name}"
                else:
                    self.alike(written[name], given[name], f"{where}: {name}")
        elif isinstance(written, list):
            assert len(written) == len(given) or written[-1:] == ["..."], where
            for one, other in zip(written, given, strict=False):
                self.alike(one, other, where)
        elif isinstance(written, str) and IDENTIFIER.match(written):
            assert IDENTIFIER.match(given), where
            self.ids[written] = given
        else:
            assert written == given, where


def serve_and_ask(block: Block, folder: Path) -> str:
    """Starts the server of a block with its options, on a free port, and asks it for a sum."""
    [words] = [each[2:] for each in block.commands if each[:2] == ["chorale", "serve"]]
    model = words.pop(0) if words and words[0][0] != "-" else "demo"
    with serving(model, folder, *words, *GREEDY) as server:
        question = [{"role": "user", "content": "What is 17 + 25?"}]
        status, body = server.ask("/v1/chat/completions", {"messages": question})
        assert status == 200, f"{block}: {body}"
        assert body["choices"][0]["message"]["content"] == "17 + 25 = 42", str(block)
        return server.log.read_text()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    folder = tmp_path_factory.mktemp("docs")
    with (
        serving("demo", folder, "--browser-tool", "offline", *GREEDY) as server,
        python_child() as python,
    ):
        yield Reader(server, folder, python)


@pytest.fixture(scope="module")
def patient_reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Has the Python tool, too, whose first start compiles an interpreter."""
    folder = tmp_path_factory.mktemp("docs")
    with serving("demo", folder, "--tool-server", "demo", *GREEDY) as server, python_child() as python:
        yield Reader(server, folder, python)


@pages
def test_the_blocks_of_a_page_do_what_the_page_says(reader: Reader, page: Path) -> None:
    reader.read(page, slow=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", SLOW, ids=page_of)
def test_the_blocks_that_take_seconds_do_what_the_page_says(patient_reader: Reader, page: Path) -> None:
    patient_reader.read(page, slow=True)


@pages
def test_a_block_that_is_not_run_is_well_formed(page: Path) -> None:
    for block in BY_PAGE[page]:
        assert "no table" not in (block.needs or ""), f"{block}: {block.needs}"
        assert block.state != "excluded" or block.needs, f"{block}: say what it needs"
        if block.language in SHELLS:
            subprocess.run(["bash", "-n", "-c", block.text], check=True, timeout=PATIENCE)
        for command in block.commands:
            check_command(command, block)
        if block.language in DATA:
            load(block)


def load(block: Block) -> None:
    if block.language == "json":
        try:
            json.loads(block.text)
        except ValueError:
            for line in block.text.splitlines():
                json.loads(line)
    elif block.language == "yaml":
        assert list(yaml.safe_load_all(block.text))
    else:
        assert tomllib.loads(block.text)


def check_command(command: list[str], block: Block) -> None:
    """A command line of ours parses, and what others name in the repository exists."""
    if command[0] == "chorale":
        check_chorale(command[1:])
    if command[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        assert command[1] in targets, f"{block}: make {command[1]}"
    for word in command:
        if extras := re.fullmatch(r"(?:\.|chorale)\[([\w,-]+)\]", word):
            known = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
                "optional-dependencies"
            ]
            assert set(extras[1].split(",")) <= known.keys(), f"{block}: {word}"
        if re.match(r"(deploy|examples|scripts)/", word):
            assert (ROOT / word).exists(), f"{block}: {word}"


def check_chorale(words: list[str]) -> None:
    name, rest = words[0], words[1:]
    if name.startswith("-") or {"--help", "-h"} & set(rest):
        return
    assert name in COMMANDS, name
    if name == "bench" and rest[0] in BENCHES:
        made = _own_parser(f"bench {rest[0]}")
        known = made.parse_known_args(rest[1:])[1]
        if rest[0] in ("latency", "throughput", "startup"):
            merge(known, {})
        else:
            assert not known, known
    elif name == "eval":
        eval_command(rest)
    elif name in ("run-batch", "selfcheck"):
        merge(_own_parser(name).parse_known_args(rest)[1], {})
    elif name in PARSERS:
        _own_parser(name).parse_args(rest)
    elif name in ("serve", "fit", "warm"):
        merge(take_gpus(rest)[0], {})


def eval_command(words: list[str]) -> None:
    from chorale_evals.commands import options, parity

    if words[:2] == ["parity", "record"]:
        parity.record_parser().read(words[2:])
    elif words[0] == "parity":
        parity.parser().read(words[1:])
    else:
        options.parser().read(words)


def test_every_endpoint_has_an_example() -> None:
    """An endpoint that is new must come with a request and its answer, in docs/reference/api-examples.md."""
    text = (ROOT / "docs" / "reference" / "api-examples.md").read_text("utf-8")
    for operation in OPERATIONS:
        heading = f"\n### {operation.method.upper()} `{operation.path}`\n"
        assert heading in text, heading
