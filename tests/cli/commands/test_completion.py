"""The scripts of ``chorale completion``, run in the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from chorale.cli.completion import whole_parser
from chorale.cli.main import COMMANDS, main
from chorale.config.options.flags import FLAGS

CASES = [
    ("chorale ser", {"serve"}, {"chat"}),
    ("chorale serve --devi", {"--device"}, {"--seed"}),
    ("chorale serve --device ", {"auto", "cpu", "cuda"}, set()),
    ("chorale serve gpt", {"gpt-oss-20b", "gpt-oss-120b"}, {"demo"}),
    ("chorale bench ", {"latency", "serve"}, {"chat"}),
    ("chorale bench latency --num-it", {"--num-iters", "--num-iters-warmup"}, {"--seed"}),
    ("chorale bench latency --max-num-s", {"--max-num-seqs"}, set()),
    ("chorale tools serve p", {"python"}, {"browser"}),
    ("chorale fit 20b --gpu h10", {"h100"}, {"h200"}),
    ("chorale completion ", {"bash", "zsh", "fish"}, set()),
    ("chorale pull --rev", {"--revision"}, set()),
    ("chorale complete gpt", {"gpt-oss-20b"}, {"demo"}),
]
BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
_chorale
printf '%s\\n' "${COMPREPLY[@]}"
"""
# An interactive shell in a pseudo-terminal, for the output after Tab.
ZSH = """
zmodload zsh/zpty
zpty -b shell zsh -f -i
zpty -w shell "PS1=''; autoload -Uz compinit; compinit -u -D; source $1; LISTMAX=999"
sleep 0.5
zpty -w -n shell "$2"$'\\t\\t\\t'
for i in {1..30}; do sleep 0.1; while zpty -r -t shell line; do print -r -- "$line"; done; done
zpty -d shell
"""


def script(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert main(["completion", shell]) == 0
    path = folder / f"chorale.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


def ask(*line: str) -> str:
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.parametrize(("typed", "wanted", "unwanted"), CASES)
def test_bash_completes(
    typed: str, wanted: set[str], unwanted: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script("bash", tmp_path, capsys)
    found = set(ask("bash", "-c", BASH, "bash", str(path), *typed.split(" ")).split())
    assert wanted <= found
    assert not unwanted & found


def test_bash_completes_after_an_equals_sign(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bash splits ``--device=cu`` into three words."""
    path = script("bash", tmp_path, capsys)
    for words in (["--device", "=", "cu"], ["--ops", "="]):
        found = ask("bash", "-c", BASH, "bash", str(path), "chorale", "serve", *words).split()
        assert found == (["cuda"] if words[-1] == "cu" else ["auto", "reference", "cpu", "triton"])


@pytest.mark.parametrize(("typed", "wanted", "unwanted"), CASES)
def test_fish_completes(
    typed: str, wanted: set[str], unwanted: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script("fish", tmp_path, capsys)
    lines = ask("fish", "-N", "-c", f"source {path}; complete -C '{typed}'").splitlines()
    found = {line.partition("\t")[0] for line in lines}
    assert wanted <= found
    assert not unwanted & found


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("chorale serve --de", "--device"),
        ("chorale bench la", "latency"),
        ("chorale fit x --gpu h10", "h100"),
    ],
)
def test_zsh_completes(typed: str, wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script("zsh", tmp_path, capsys)
    ask("zsh", "-n", str(path))
    assert wanted in ask("zsh", "-f", "-c", ZSH, "zsh", str(path), typed)


def test_every_command_and_flag_is_completed() -> None:
    commands = whole_parser()._get_positional_actions()[0].choices
    assert isinstance(commands, dict)
    assert commands.keys() == COMMANDS.keys()
    latency, show = (
        commands[group]._get_positional_actions()[0].choices[member]
        for group, member in (("bench", "latency"), ("config", "show"))
    )
    acting = {f"--{flag.name}" for flag in FLAGS.values() if flag.target is not None}
    for parser in (commands["serve"], latency, show):
        assert acting <= parser._option_string_actions.keys()


def test_an_unknown_shell_is_refused_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bsh"]) == 2
    assert "bash" in capsys.readouterr().err
