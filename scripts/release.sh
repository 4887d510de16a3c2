#!/bin/sh
# Make the files of a release in dist/: release.sh [PYTHON]. Needs git and a package registry.
#
# Builds the sdist, and from it the wheel of this machine; checks their metadata; installs the wheel in an empty
# environment and asks it a question; writes what that environment consists of as a CycloneDX document, and
# checksums. The version is that of the tag (git tag v0.1.0), or a development version after the last one.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
python=${1:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
cd "$here"

test -z "$(git status --porcelain)" || echo "note: there are uncommitted changes; the version will say so" >&2
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) # two builds of a commit are equal
export SOURCE_DATE_EPOCH
if [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null 2>&1; then
    export TORCH_CPU="${TORCH_CPU:-torch==2.13.0}" # see scripts/install.sh
fi

echo "building ..."
rm -rf dist
"$python" -m venv "$work/tools"
"$work/tools/bin/python" -m pip --quiet --disable-pip-version-check install build twine cyclonedx-bom
"$work/tools/bin/python" -m build --outdir dist . >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
"$work/tools/bin/python" -m twine check --strict dist/*

echo "trying the wheel ..."
wheel=$(ls dist/*.whl)
sh scripts/try_wheel.sh "$python" "$wheel" "$work/venv"

echo "listing what it consists of ..."
sh scripts/sbom.sh "$work/tools/bin/cyclonedx-py" "$wheel" "$work/venv"
sums=$(command -v sha256sum || echo "shasum -a 256")
(cd dist && $sums -- * >"$work/SHA256SUMS" && mv "$work/SHA256SUMS" .)
cat dist/SHA256SUMS
