#!/bin/sh
# Install a wheel into an empty environment and ask it a question: try_wheel.sh [PYTHON [WHEEL [VENV]]].
# Without WHEEL, builds one. VENV is where the environment is kept; without it, it is removed. Needs a package registry.
# Everything runs in an empty folder, so files of the checkout (tests, docs, an editable path) cannot help.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
python=${1:-python3} wheel=${2:-}
work=$(mktemp -d)
venv=${3:-$work/venv} server=
trap 'test -z "$server" || kill "$server" 2>/dev/null || true; rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if [ -z "$wheel" ]; then
    "$python" -m venv "$work/build"
    "$work/build/bin/python" -m pip --quiet install build
    "$work/build/bin/python" -m build --outdir "$work/dist" "$here"
    wheel=$(ls "$work"/dist/*.whl)
fi
wheel=$(cd "$(dirname "$wheel")" && pwd)/$(basename "$wheel")

cd "$work"
"$python" -m venv "$venv"
if command -v uv >/dev/null 2>&1; then # uv can select the CPU build of torch
    uv pip install --quiet --python "$venv/bin/python" --torch-backend=cpu "$wheel"
else
    test -z "${TORCH_CPU:-}" || "$venv/bin/python" -m pip --quiet install "$TORCH_CPU"
    "$venv/bin/python" -m pip --quiet install "$wheel"
fi
"$venv/bin/python" -c 'import chorale, sys; sys.exit(not chorale.__file__.startswith(sys.prefix))'
"$venv/bin/python" -c 'import importlib.resources as r; r.files("chorale").joinpath("py.typed").read_bytes()'
"$venv/bin/chorale" --version

# chat starts a server of its own, which ends with it. XDG_CACHE_HOME: the demo is unpacked here, not in the user's cache.
answer=$(XDG_CACHE_HOME="$work/cache" XDG_STATE_HOME="$work/state" \
    "$venv/bin/chorale" chat demo --quick "What is 17 + 25?" --temperature 0 2>"$work/log") || { cat "$work/log" >&2; exit 1; }
echo "$answer"
case $answer in *42*) ;; *) exit 1 ;; esac
