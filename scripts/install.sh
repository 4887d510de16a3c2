#!/bin/sh
# Install a requirement into a virtual environment: install.sh VENV REQUIREMENT (. or .[test] or .[dev]).
# INSTALLER=pip uses pip even if uv is installed.
#
# On a Linux machine without a GPU, the default torch of the package index includes several GB of CUDA
# libraries. uv can select the CPU build (--torch-backend); pip cannot, so it is given a release whose CPU
# builds are commonly mirrored (TORCH_CPU), and takes a "+cpu" build if it finds one.
# [test] and [dev] also install Triton, which CPU builds do not include (without it, the kernel tests are
# skipped), and chorale-evals, whose tests are run with the others.
set -eu
venv=$1 requirement=$2
TORCH_CPU=${TORCH_CPU:-torch==2.13.0}
PROGRESS=${PROGRESS:-15} # seconds between lines about what is being done

case $requirement in
    .\[test\] | .\[dev\]) kernels=${requirement%]},kernels] evals="-e ./evals" ;;
    *) kernels=$requirement evals= ;;
esac

log=$(mktemp) child=
trap 'test -z "$child" || kill "$child" 2>/dev/null || true; rm -f "$log"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 || [ -e /dev/kfd ]; }

# Run a command with its output in $log. Every $PROGRESS seconds, print the time and the last line of the output.
watched() {
    begin=$(date +%s) next=$PROGRESS status=0
    "$@" >"$log" 2>&1 &
    child=$!
    while kill -0 "$child" 2>/dev/null; do
        sleep 1
        seconds=$(($(date +%s) - begin))
        if [ "$seconds" -ge "$next" ]; then
            doing=$(tail -n 1 "$log" | sed -E -e 's/^ *//' -e 's/^Preparing editable metadata.*/compiling the CPU kernels/' \
                -e 's/^(Getting requirements|Installing (build|backend) dependencies).*/preparing the build/' \
                -e 's/^(Installing collected packages|Successfully uninstalled).*/installing the packages/' | cut -c 1-90)
            echo "  $seconds s: ${doing:-compiling Python files}"
            next=$((seconds + PROGRESS))
        fi
    done
    wait "$child" || status=$?
    child=
    return "$status"
}

# One call installs everything, with Triton if available: each further call resolves all requirements again.
all() {
    # shellcheck disable=SC2086
    watched "$@" -e "$kernels" $evals && return
    { [ "$kernels" != "$requirement" ] && grep -qi triton "$log"; } || return
    echo "  Triton is not available here, so the kernel tests will be skipped."
    # shellcheck disable=SC2086
    watched "$@" -e "$requirement" $evals
}

failed() {
    cat "$log" >&2
    echo "Chorale was not installed: see the error above. $1" >&2
    exit 1
}

with_uv() {
    echo "Installing Chorale and PyTorch with uv (1 to 3 minutes the first time) ..."
    install="uv pip install --python $venv/bin/python"
    all $install --torch-backend=auto && return
    if grep -q download.pytorch.org "$log"; then
        echo "  PyTorch's own index cannot be used here; trying the default index."
        all $install && return
    fi
    failed "To install with pip instead: make clean, then the same command with INSTALLER=pip."
}

with_pip() {
    echo "Installing Chorale and PyTorch with pip (1 to 3 minutes the first time) ..."
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null
    # pip compiles to byte code on one core; compileall below uses all of them.
    install="$venv/bin/python -m pip --disable-pip-version-check install --no-compile --progress-bar off"
    if [ "$(uname -s)" != Linux ] || has_gpu || "$venv/bin/python" -c 'import torch' 2>/dev/null; then
        all $install || failed ""
    elif ! all $install "$TORCH_CPU"; then
        grep -q "No matching distribution found for $TORCH_CPU" "$log" || failed ""
        echo "  $TORCH_CPU is not available here; installing the newest torch."
        all $install || failed ""
    fi
    # Some files of torch need a newer Python, so errors are ignored.
    watched "$venv/bin/python" -m compileall -q -j 0 "$venv/lib" || true
}

begun=$(date +%s)
if [ "${INSTALLER:-uv}" = uv ] && command -v uv >/dev/null 2>&1; then
    with_uv
else
    with_pip
fi
echo "Installed in $(($(date +%s) - begun)) s."
