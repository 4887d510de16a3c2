"""The language of the code and the docs: banned phrases, how docstrings begin, loggers, the glossary.

``PHRASES`` lists phrases that have to be read twice, with the plain form. Places in ``NOT_YET`` contain some;
the list only shrinks. ``EXCEPTIONS`` names single places, each with its reason.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "chorale"

# phrase -> what to write instead
PHRASES = {
    r"whoever": "the caller, the client, or the name of the thing",
    r"whatever it is": "say what it is",
    r"(?<!there )(?:is|are|was|were) (?-i:none)\b": "there is no ..., returns None, or is missing",
    r"is told|are told|was told": "receives, is notified",
    r"comes of it|came of it|becomes of it|becomes of each": "the result, the treatment",
    r"an? texts?\b(?= (?:must|is one|is none|itself is))|lists? of texts": "a string, a list of strings",
    r"whole numbers?": "integer",
    r"tells? (?:what|which|why|whether|how)": "returns, contains, shows",
    r"wishes|buries|buried|complains?|wants to know": "a verb for what the program does",
    r"ones? of ours|of ours|as ours": "Chorale's, this server's",
    r"a fault of ours": "a bug",
    r"one's own": "a custom ...",
    r"cannot be had|can be had": "is unavailable",
    r"is asked for its|what is asked": "the request",
    r"stands? for itself": "say what it means",
    r"word for word": "verbatim",
    r"side by side": "concurrently",
    r"for good\b": "forever, permanently",
    r"goes on where": "resumes",
    r"in its own words|in the server's words": "with its own message",
    r"people's scripts": "scripts",
    r"nobody (?:can|has|else)|anybody may": "name the subject",
    r"nothing of it\b": "say what is absent",
    r"and its like": "such as ...",
}
BANNED = [(re.compile(rf"\b(?:{phrase})", re.IGNORECASE), instead) for phrase, instead in PHRASES.items()]

# A docstring starts with a verb or a noun phrase; return values are introduced by "Returns".
OPENINGS = re.compile(
    r"(?:Whether|None[:;,]|True[:;,]|False[:;,]|What|How|Who|Why|Where|Of|Afterwards|Nothing)\b", re.ASCII
)

# Packages, modules and pages whose language has not been revised yet.
NOT_YET: tuple[str, ...] = ()
# (file, phrase) -> reason
EXCEPTIONS: dict[tuple[str, str], str] = {}

LOGGERS = {"chorale.access", "chorale.stats"}  # channels of their own, as docs/operating.md describes


class Words(NamedTuple):
    """A comment, a docstring or another string, with its line."""

    line: int
    text: str
    docstring: bool = False


def words_of(source: str) -> Iterator[Words]:
    """Yields the comments and strings of a module; of an f-string its constant parts."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield Words(node.lineno, " ".join(node.value.split()), id(node) in docs)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Words(token.start[0], token.string.lstrip("# "))


def faults(source: str) -> Iterator[str]:
    for line, text, docstring in words_of(source):
        for phrase, instead in BANNED:
            if found := phrase.search(text):
                yield f"line {line}: {found.group()!r}; write: {instead}"
        if docstring and (found := OPENINGS.match(text)):
            yield f"line {line}: a docstring begins with {found.group()!r}, not with a verb or noun phrase"


def place_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_revised(place: str) -> bool:
    return not any(place == each or place.startswith(f"{each}/") for each in NOT_YET)


@functools.cache
def modules() -> tuple[Path, ...]:
    return tuple(sorted(PACKAGE.rglob("*.py")))


def in_package(name: str) -> Iterator[Path]:
    """Yields the modules of a package below ``chorale``, or the module of that name."""
    return (path for path in modules() if path.relative_to(PACKAGE).parts[0].removesuffix(".py") == name)


PACKAGES = sorted({path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in modules()})


@pytest.mark.parametrize("package", PACKAGES)
def test_plain_english(package: str) -> None:
    found = [
        f"{place_of(path)} {fault}"
        for path in in_package(package)
        if is_revised(place_of(path))
        for fault in faults(path.read_text("utf-8"))
        if not any(place_of(path) == where and what in fault for where, what in EXCEPTIONS)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=place_of)
def test_plain_english_in_the_docs(page: Path) -> None:
    lines = page.read_text("utf-8").splitlines() if is_revised(place_of(page)) else []
    found = [
        f"{place_of(page)}:{number}: {hit.group()!r}; write: {instead}"
        for number, line in enumerate(lines, 1)
        for phrase, instead in BANNED
        if (hit := phrase.search(line))
    ]
    assert not found, "\n".join(found)


def test_what_is_listed_as_not_revised_has_faults() -> None:
    """A place without faults leaves ``NOT_YET``, and so does an exception that is not needed."""
    files = {place_of(path): path.read_text("utf-8") for path in modules()}
    for each in NOT_YET:
        if each.startswith("chorale"):
            texts = [text for place, text in files.items() if place == each or place.startswith(f"{each}/")]
            assert any(list(faults(text)) for text in texts), f"remove from NOT_YET: {each}"
    for (where, what), reason in EXCEPTIONS.items():
        assert reason
        assert any(what in fault for fault in faults(files[where])), (where, what)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ('"""Whoever calls."""', "'Whoever'"),
        ('def f():\n    """Whether it is."""', "begins with 'Whether'"),
        ("x = 1  # of ours", "'of ours'"),
        ('raise ValueError(f"{x} must be a whole number")', "'whole number'"),
        ('"""Returns the number."""\nx = None if y is None else 1', None),
    ],
)
def test_what_is_found(source: str, fault: str | None) -> None:
    found = list(faults(source))
    assert (len(found) == 1 and fault in found[0]) if fault else not found


@pytest.mark.parametrize("package", ["api", "bench", "cli", "store", "tools", "turns"])
def test_loggers_are_named_after_their_module(package: str) -> None:
    for path in in_package(package):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
                continue
            if not ast.unparse(node.value.func).endswith("getLogger"):
                continue
            name = ast.unparse(node.value.args[0])
            assert name == "__name__" or ast.literal_eval(name) in LOGGERS, f"{path}: {name}"
            assert ast.unparse(node.targets[0]).endswith("logger"), path


# term -> words that meant the same and are not used for it any more, as identifiers
SYNONYMS = {
    "ToolError": ("ToolFault", "McpFault", "HttpFault"),
    "HttpMiddleware": ("Shell",),
    "AuthenticatedRoute": ("Guarded", "guard_routes"),
    "BuiltInTool": ("Hosted", "hosted_tools"),
    "DecodeGraphRunner": ("Decodes",),
    "LoadRequest": ("make_jobs",),
}


def glossary() -> list[tuple[str, str]]:
    """Returns (term, where) of every row."""
    lines = (ROOT / "docs" / "glossary.md").read_text("utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [(row[0], row[2]) for row in rows if row[0] != "term"]


def test_the_glossary_names_what_exists() -> None:
    source = "\n".join(path.read_text("utf-8") for path in modules())
    names = set(re.findall(r"\w+", source))
    assert len(glossary()) >= 40
    for term, where in glossary():
        for place in re.findall(r"`([^`]+)`", where):
            if "/" in place or place.endswith(".py"):
                assert (PACKAGE / place).exists(), f"{term}: {place}"
            else:
                assert set(place.split(".")) <= names, f"{term}: {place}"


@pytest.mark.parametrize("term", SYNONYMS)
def test_one_word_for_one_thing(term: str) -> None:
    source = "\n".join(path.read_text("utf-8") for path in modules())
    assert re.search(rf"\b{term}\b", source)
    for other in SYNONYMS[term]:
        assert not re.search(rf"^\s*(?:async )?(?:class|def) {other}\b", source, re.MULTILINE), other
