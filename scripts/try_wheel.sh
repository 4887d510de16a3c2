#!/bin/sh
# Build the wheel, install it outside the checkout, and try it: try_wheel.sh [PYTHON]. Needs a package registry.
# Everything runs in an empty folder, so files of the checkout (tests, docs, an editable path) cannot help.
set -eu
python=${1:-python3}
here=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
server=
trap 'test -z "$server" || kill "$server" 2>/dev/null || true; rm -rf "$work"' EXIT INT TERM

"$python" -m venv "$work/build"
"$work/build/bin/python" -m pip --quiet install build
"$work/build/bin/python" -m build --outdir "$work/dist" "$here"

cd "$work"
"$python" -m venv venv
if command -v uv >/dev/null 2>&1; then # uv can select the CPU build of torch
    uv pip install --quiet --python venv/bin/python --torch-backend=cpu dist/chorale_serve-*.whl
else
    test -z "${TORCH_CPU:-}" || venv/bin/python -m pip --quiet install "$TORCH_CPU"
    venv/bin/python -m pip --quiet install dist/chorale_serve-*.whl
fi
venv/bin/python -c 'import chorale, sys; sys.exit(not chorale.__file__.startswith(sys.prefix))'
venv/bin/python -c 'import importlib.resources as r; r.files("chorale").joinpath("py.typed").read_bytes()'
venv/bin/chorale --version

port=$(venv/bin/python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
XDG_STATE_HOME="$work/state" venv/bin/chorale serve demo --port "$port" >server.log 2>&1 &
server=$!
for _ in $(seq 120); do
    kill -0 "$server" || { cat server.log; exit 1; }
    venv/bin/python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$port/health')" 2>/dev/null && break
    sleep 1
done
venv/bin/python - "$port" <<'END'
import json, sys, urllib.request

body = {"model": "demo", "temperature": 0, "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
request = urllib.request.Request(
    f"http://127.0.0.1:{sys.argv[1]}/v1/chat/completions",
    json.dumps(body).encode(),
    {"Content-Type": "application/json"},
)
answer = json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"]
print(answer)
sys.exit("42" not in answer)
END
