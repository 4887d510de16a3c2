#!/bin/sh
# Install a requirement into a virtual environment: install.sh VENV REQUIREMENT (. or .[test] or .[dev]).
#
# On a Linux machine without a GPU, the default torch of the package index includes several GB of CUDA
# libraries. uv can select the CPU build (--torch-backend); pip cannot, so it is given a release whose CPU
# builds are commonly mirrored (TORCH_CPU), and takes a "+cpu" build if it finds one.
# [test] and [dev] also install Triton, which CPU builds do not include (without it, the kernel tests are
# skipped), and chorale-evals, whose tests are run with the others.
set -eu
venv=$1 requirement=$2
TORCH_CPU=${TORCH_CPU:-torch==2.13.0}

case $requirement in
    .\[test\] | .\[dev\]) kernels=${requirement%]},kernels] evals="-e ./evals" ;;
    *) kernels=$requirement evals= ;;
esac

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 || [ -e /dev/kfd ]; }

# One call installs everything, with Triton if available: each further call resolves all requirements again.
all() {
    # shellcheck disable=SC2086
    "$@" -e "$kernels" $evals && return
    # shellcheck disable=SC2086
    "$@" -e "$requirement" $evals || return
    [ "$kernels" = "$requirement" ] || echo "Triton is not available; the kernel tests will be skipped" >&2
}

if command -v uv >/dev/null 2>&1; then
    echo "installing $requirement with uv ..."
    install="uv pip install --quiet --python $venv/bin/python"
    all $install --torch-backend=auto || all $install
else
    echo "installing $requirement with pip (a minute or two the first time) ..."
    # pip compiles to byte code on one core; compileall below uses all of them.
    install="$venv/bin/python -m pip --disable-pip-version-check --quiet install --no-compile"
    if [ "$(uname -s)" = Linux ] && ! has_gpu && ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
        all $install "$TORCH_CPU" || { echo "$TORCH_CPU is not available; installing the newest torch" >&2 && all $install; }
    else
        all $install
    fi
    "$venv/bin/python" -m compileall -q -j 0 "$venv/lib" >/dev/null 2>&1 || true # some files of torch need a newer Python
fi
