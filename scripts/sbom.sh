#!/bin/sh
# Write what a wheel consists of as a CycloneDX document beside it: sbom.sh CYCLONEDX_PY WHEEL VENV.
# VENV has the wheel and nothing else (scripts/try_wheel.sh); pip, with which it was made, is removed from it.
set -eu
cyclonedx=$1 wheel=$2 venv=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
version=$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("chorale-serve"))')
sed "s/^dynamic = \[\"version\"\]/version = \"$version\"/" "$(dirname "$0")/../pyproject.toml" >"$work/pyproject.toml"
"$venv/bin/python" -m pip --quiet uninstall --yes setuptools pip
"$cyclonedx" environment --pyproject "$work/pyproject.toml" --mc-type application --output-reproducible \
    --output-file "${wheel%.whl}.cdx.json" "$venv/bin/python"
