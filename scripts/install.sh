#!/bin/sh
# Install a requirement into a virtual environment: install.sh VENV REQUIREMENT (. or .[test] or .[dev]).
#
# On a Linux machine without an NVIDIA driver the plain torch of the package index would bring several GB of
# CUDA libraries. uv can pick the CPU build by itself (--torch-backend); pip cannot, so there we ask for the
# release that CPU builds are commonly mirrored for (TORCH_CPU) and let pip take a "+cpu" build if it finds one.
# Who runs the tests gets Triton too, which CPU builds do not bring; without it the kernels' tests are skipped.
# And chorale-evals, whose tests are run with the others.
set -eu
venv=$1 requirement=$2
TORCH_CPU=${TORCH_CPU:-torch==2.13.0}

case $requirement in
    .\[test\] | .\[dev\]) kernels=${requirement%]},kernels] evals="-e ./evals" ;;
    *) kernels=$requirement evals= ;;
esac

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 || [ -e /dev/kfd ]; }

# With Triton if it can be had, in one call: each further one resolves all requirements again.
all() {
    # shellcheck disable=SC2086
    "$@" -e "$kernels" $evals && return
    # shellcheck disable=SC2086
    "$@" -e "$requirement" $evals || return
    [ "$kernels" = "$requirement" ] || echo "no Triton here; the tests of the kernels will be skipped" >&2
}

if command -v uv >/dev/null 2>&1; then
    echo "installing $requirement with uv ..."
    install="uv pip install --quiet --python $venv/bin/python"
    all $install --torch-backend=auto || all $install
else
    echo "installing $requirement with pip (a minute or two the first time) ..."
    # pip would compile what it installs one file after another; all cores do it together.
    install="$venv/bin/python -m pip --disable-pip-version-check --quiet install --no-compile"
    if [ "$(uname -s)" = Linux ] && ! has_gpu && ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
        all $install "$TORCH_CPU" || { echo "no $TORCH_CPU here; taking the newest torch" >&2 && all $install; }
    else
        all $install
    fi
    "$venv/bin/python" -m compileall -q -j 0 "$venv/lib" >/dev/null 2>&1 || true # torch has files for newer Pythons
fi
