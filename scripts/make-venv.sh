#!/bin/sh
# Make a virtual environment: make-venv.sh PYTHON DIR. Uses uv if installed (not with INSTALLER=pip), else venv.
set -eu
python=$1 venv=$2
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "Chorale needs Python 3.11 or newer; '$python' is not. Try: make PYTHON=python3.12 ..." >&2
    exit 1
}
if [ "${INSTALLER:-uv}" = uv ] && command -v uv >/dev/null 2>&1; then
    uv venv --quiet --python "$python" "$venv"
else
    "$python" -m venv "$venv"
fi
