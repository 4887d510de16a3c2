#!/bin/sh
# Clients that are too large, or too new, for the test environment: install.sh FOLDER [CLIENT ...], where CLIENT is one
# of codex, nodes, evals, bench, lm_eval, inspect and guidellm (default: all).
#
# Prints the variables by which the tests of this folder find them:
#   eval "$(sh tests/acceptance/clients/install.sh /some/folder)" && pytest tests/acceptance/clients
# CHORALE_VENV (.venv) is the environment of the tests; vLLM's client borrows torch and transformers from it.
set -eu
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
venv=$(cd "${CHORALE_VENV:-.venv}" && pwd)
EVALS_PYTHON=${EVALS_PYTHON:-python3.12} # gpt-oss 0.0.9 asks for 3.12

install_into() {
    python=$1
    shift
    "$python" -m pip install --quiet --disable-pip-version-check "$@" >&2
}

codex() {
    npm install --silent --prefix "$folder/codex" @openai/codex >&2
    echo "export CHORALE_CODEX='$folder/codex/node_modules/.bin/codex'"
}

# Major versions that Node 20 runs; CHORALE_AI_SDK=latest installs those for Node 22.
nodes() {
    case ${CHORALE_AI_SDK:-} in
    latest) versions="ai @ai-sdk/openai @ai-sdk/anthropic @ai-sdk/openai-compatible @ai-sdk/open-responses openai" ;;
    *) versions="ai@6 @ai-sdk/openai@3 @ai-sdk/anthropic@3 @ai-sdk/openai-compatible@2 @ai-sdk/open-responses@1 openai@6" ;;
    esac
    # shellcheck disable=SC2086
    npm install --silent --prefix "$folder/nodes" $versions @anthropic-ai/sdk zod >&2
    echo "export CHORALE_NODE_CLIENTS='$folder/nodes'"
}

# The package asks for a docker client, a web server and more, which its evals never import.
evals() {
    "$EVALS_PYTHON" -m venv "$folder/evals"
    install_into "$folder/evals/bin/python" openai numpy pandas jinja2 tqdm blobfile requests
    install_into "$folder/evals/bin/python" --no-deps gpt-oss==0.0.9
    echo "export CHORALE_EVALS_PYTHON='$folder/evals/bin/python'"
}

# The Python files of vLLM's wheel (340 MB to download, 60 MB to keep), not its kernels: a client needs none.
bench() {
    "$venv/bin/python" -m venv "$folder/bench"
    python=$folder/bench/bin/python
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --dest "$folder/wheel" vllm >&2
    "$python" - "$folder" "$venv" >&2 <<'END'
import pathlib, sys, sysconfig, zipfile
folder, borrowed = map(pathlib.Path, sys.argv[1:])
site = pathlib.Path(sysconfig.get_path("purelib"))
[wheel] = (folder / "wheel").glob("vllm-*.whl")
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(site, [name for name in archive.namelist() if not name.endswith(".so")])
[lent] = borrowed.glob("lib/python3*/site-packages")
(site / "borrowed.pth").write_text(f"{lent}\n")
wheel.unlink()
END
    install_into "$python" aiohttp pandas pillow psutil gguf py-cpuinfo cachetools pybase64 cbor2 fastapi \
        partial-json-parser watchfiles einops cloudpickle msgspec
    install_into "$python" --no-deps xgrammar apache-tvm-ffi
    echo "export CHORALE_VLLM_PYTHON='$python'"
}

# The next three each in an environment of its own, since their requirements exclude each other's.
lm_eval() {
    "$EVALS_PYTHON" -m venv "$folder/lm_eval"
    install_into "$folder/lm_eval/bin/python" 'lm_eval[api]==0.4.13' transformers
    echo "export CHORALE_LM_EVAL_PYTHON='$folder/lm_eval/bin/python'"
}

inspect() {
    "$EVALS_PYTHON" -m venv "$folder/inspect"
    install_into "$folder/inspect/bin/python" inspect-ai==0.3.285 openai
    echo "export CHORALE_INSPECT_PYTHON='$folder/inspect/bin/python'"
}

guidellm() {
    "$EVALS_PYTHON" -m venv "$folder/guidellm"
    install_into "$folder/guidellm/bin/python" guidellm==0.8.1
    echo "export CHORALE_GUIDELLM_PYTHON='$folder/guidellm/bin/python'"
}

[ $# -gt 0 ] || set -- codex nodes evals bench lm_eval inspect guidellm
for client in "$@"; do "$client"; done
