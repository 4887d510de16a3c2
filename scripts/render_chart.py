"""Renders the Helm chart with each values file of its ci/ folder into tests/deploy/rendered:
`python scripts/render_chart.py [--check]`.

Needs the program helm or the package helm-python-sdk. Tests read the rendered files and need
neither; the first line of each file has a digest of the chart, which shows whether it is current.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
CHART = ROOT / "deploy" / "helm" / "chorale"
RENDERED = ROOT / "tests" / "deploy" / "rendered"
RELEASE, NAMESPACE = "llm", "serving"
INFO = 1  # severity of a finding; 2 is a warning, 3 an error


def digest() -> str:
    """Returns a digest of all files of the chart."""
    found = hashlib.sha256()
    for path in sorted(CHART.rglob("*")):
        if path.is_file():
            found.update(f"{path.relative_to(CHART)}\0".encode() + path.read_bytes())
    return found.hexdigest()


def render(values: Path) -> dict[str, str]:
    """Returns the rendered templates by name, notes and tests included."""
    if program := shutil.which("helm"):
        command = [program, "template", RELEASE, str(CHART), f"--namespace={NAMESPACE}", f"--values={values}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return {"helm template": done.stdout}
    import helm_python  # type: ignore[import-not-found]

    with helm_python.Chart.load(str(CHART)) as chart:
        given = yaml.safe_load(values.read_text("utf-8"))
        chart.validate_schema(given)
        made: dict[str, str] = chart.render(given, name=RELEASE, namespace=NAMESPACE)
    return made


def documents(rendered: dict[str, str]) -> list[object]:
    """Returns the objects, sorted by kind and name."""
    found = [
        each
        for name, text in rendered.items()
        if not name.endswith("NOTES.txt")
        for each in yaml.safe_load_all(text)
        if each
    ]
    return sorted(found, key=lambda each: (each["kind"], each["metadata"]["name"]))


def lint() -> list[str]:
    """Returns the findings of helm lint above "info"."""
    if program := shutil.which("helm"):
        command = [program, "lint", str(CHART), f"--values={CHART / 'ci' / 'defaults.yaml'}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return [] if done.returncode == 0 else [done.stdout]
    import helm_python

    given = yaml.safe_load((CHART / "ci" / "defaults.yaml").read_text("utf-8"))
    messages = helm_python.lint(str(CHART), values=given)["messages"]
    return [str(each) for each in messages if each["severity"] > INFO]


def main() -> int:
    check = "--check" in sys.argv[1:]
    if not check:  # a chart cannot contain files from outside its folder
        (CHART / "files" / "alerts.yml").write_bytes(ALERTS.read_bytes())
    stale = lint()
    for values in sorted((CHART / "ci").glob("*.yaml")):
        body = yaml.safe_dump_all(documents(render(values)), sort_keys=False, width=120)
        text = f"# python scripts/render_chart.py; chart {digest()}\n{body}"
        target = RENDERED / values.name
        if check and (not target.exists() or target.read_text("utf-8") != text):
            stale.append(f"{target.relative_to(ROOT)} is not current")
        elif not check:
            target.write_text(text, "utf-8")
    print(*stale, sep="\n", end="\n" if stale else "")
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
