"""Nothing tells the reader to install Chorale by name: "chorale" in the package index is another project."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

from chorale.errors import install_hint

ROOT = Path(__file__).resolve().parents[1]
_NAME = r"""["'`(]*chorale(?:[-_]serve)?(?![\w/*:-]|\.\w)"""
_SPACE = r"(?:[ \t]|\\\n)+"
_WORDS = rf"(?:{_SPACE}(?!chorale\b)[^\s`;&|#]+){{0,8}}?"
BY_NAME = re.compile(
    # An installer, its command, options and other packages, then the name.
    rf"\b(?:(?:pip[3x]?|uv|poetry|pdm|conda|mamba){_WORDS}{_SPACE}(?:install|add|download|wheel|inject)|uvx"
    rf"|pipx\s+run|uv\s+tool\s+run|reinstall)(?:{_WORDS}{_SPACE}|\s+#?\s*){_NAME}"
    # Images and environments that are built from lists of names.
    rf"|--with[\s=]+{_NAME}|pip_install\([^)]*{_NAME}|\bpip:\s*\[[^\]]*{_NAME}|\bpackages\s*=\s*\[[^\]]*{_NAME}"
    # A requirement: with an extra (also in prose), or with a version at the start of a line or a string.
    r"""|\bchorale(?:[-_]serve)?\[[\w,-]+\]|(?:^|["'])chorale(?:[-_]serve)?\s*(?:[=~>]=|@)\s*\S""",
    re.MULTILINE,
)
# The changelog names the extras of old versions. The project's metadata must name the project.
EXCEPT = {"CHANGELOG.md", "pyproject.toml", "tests/test_install_hints.py"}


def _texts() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout.split("\0")  # fmt: skip
    names = [name for name in listed if name] or [
        str(path.relative_to(ROOT))
        for folder in ("chorale", "docs", "deploy", "examples", "scripts", "tests", "benchmarks", ".github")
        for path in (ROOT / folder).rglob("*")
    ]
    kinds = (
        ".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".txt", ".service", ".tpl", ".html", ".js", "file",
    )  # fmt: skip
    return [ROOT / name for name in names if name.endswith(kinds) and name not in EXCEPT]


def test_no_text_installs_chorale_by_name() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {hit.group()}"
        for path in _texts()
        if path.is_file()
        for hit in BY_NAME.finditer(path.read_text("utf-8", errors="replace"))
    ]
    assert not found


PLANTED = (
    "pip install 'chorale[ray]'", 'python -m pip install --upgrade "chorale"', "pip3 install -U chorale.",
    "pip install \\\n    chorale-serve", "# pip install\n# chorale, then", "uv run --with chorale python",
    "pip install torch==2.13 chorale==0.1.0", "uv tool install `chorale`", "uvx chorale serve demo",
    "pipx run chorale serve", "poetry add chorale-serve", "needs chorale[otel]",
    'dependencies = ["chorale-serve==0.1.0"]', 'image.pip_install("torch", "chorale")',
    'runtime_env: {pip: ["chorale"]}', "reinstall chorale, or unset",
)  # fmt: skip
HARMLESS = (
    "pip install '.[ray]' from a checkout of Chorale", "pip install . && chorale serve demo",
    'python3 -m venv /opt/chorale && /opt/chorale/bin/pip install ".[postgres]"',
    "pip install dist/chorale_serve-*.whl", "docker run chorale:cpu chorale serve",
)  # fmt: skip


def test_the_pattern_finds_only_installs_by_name() -> None:
    assert [text for text in PLANTED if not BY_NAME.search(text)] == []
    assert [text for text in HARMLESS if BY_NAME.search(text)] == []


def test_the_hint_names_extras_that_exist_and_is_the_only_one_in_the_code() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    calls = {}
    for path in sorted((ROOT / "chorale").rglob("*.py")):
        source = path.read_text("utf-8")
        calls.update(dict.fromkeys(re.findall(r"""install_hint\(["']([\w-]+)["']\)""", source), path))
        if path.name != "errors.py":
            assert not re.search(r"""pip install ["']?\.""", source), path
    assert set(calls) >= {"otel", "postgres", "python-tool", "ray", "s3"}
    assert set(calls) <= set(extras)
    assert install_hint("ray").startswith("pip install -e '.[ray]' ")
    assert install_hint().startswith("pip install -e . ")


def test_the_project_names_itself_as_it_is_published() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["name"] == "chorale-serve"
    assert project["scripts"] == {"chorale": "chorale.cli.main:main"}
    requirements = [each for extra in project["optional-dependencies"].values() for each in extra]
    own = [each for each in requirements if each.startswith("chorale")]
    assert own
    assert all(re.fullmatch(r"chorale-serve\[[\w-]+\]", each) for each in own)
