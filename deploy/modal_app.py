"""Chorale on Modal, in the place of vLLM in Modal's guide for gpt-oss: the same app, port, names and weights.

    modal deploy deploy/modal_app.py      an endpoint that starts with the first request
    modal run deploy/modal_app.py         starts a server and asks it two questions

The guide's client works unchanged: it waits for /health and reads streams of the model "llm". An API key is
optional: `modal secret create chorale CHORALE_API_KEY=...`, then `CHORALE_SECRET=chorale modal deploy ...`.
Never deployed by us; docs/how-to/deploy.md says what was checked.
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from pathlib import Path

import modal

ROOT = Path(__file__).resolve().parents[1] if modal.is_local() else Path("/src")
MINUTES = 60
PORT = 8000

MODEL_NAME = "openai/gpt-oss-20b"  # or openai/gpt-oss-120b, which fits one H200 too
MODEL_REVISION = "d666cf3b67006cf8227666739edf25164aaffdeb"
GPU = os.environ.get("CHORALE_GPU", "H200")
N_GPU = 1
MAX_INPUTS = 64  # requests that one container answers at a time before Modal starts another

# Options of the guide have the same names here. Those that only set up vLLM's compilation are left out.
OPTIONS = {
    "max-num-seqs": MAX_INPUTS,
    "max-model-len": 32768,
    "max-num-batched-tokens": 16384,
    "stream-interval": 20,
    "kv-cache-dtype": "fp8",
}
# A draft head, as in the guide. None: no speculative decoding (docs/explanation/speculation.md: figures).
SPECULATIVE_CONFIG: dict[str, object] | None = {
    "method": "eagle3",
    "model": "RedHatAI/gpt-oss-20b-speculator.eagle3",
    "num_speculative_tokens": 3,
}

KERNELS = "/opt/triton-cache"


def command() -> list[str]:
    """Returns the command that serves."""
    found = ["chorale", "serve", MODEL_NAME, "--revision", MODEL_REVISION]
    found += ["--served-model-name", MODEL_NAME, "llm", "--host", "0.0.0.0", "--port", str(PORT)]
    found += ["--tensor-parallel-size", str(N_GPU)]
    found += [part for name, value in OPTIONS.items() for part in (f"--{name}", str(value))]
    if SPECULATIVE_CONFIG:
        found += ["--speculative-config", json.dumps(SPECULATIVE_CONFIG)]
    return found


def warm_command() -> str:
    """Returns the command that compiles kernels while the image is built; it needs no GPU."""
    sizes = " ".join(f"--{name} {value}" for name, value in OPTIONS.items() if name != "stream-interval")
    return f"chorale warm {MODEL_NAME.rpartition('/')[2]} --gpu {GPU} {sizes}"


image = (
    modal.Image.debian_slim(python_version="3.12")
    .apt_install("gcc", "libc6-dev")  # Triton compiles the C code that launches kernels
    .pip_install_from_pyproject(str(ROOT / "pyproject.toml"))
    .env({"TRITON_CACHE_DIR": KERNELS})
    .add_local_dir(ROOT / "chorale", "/src/chorale", copy=True, ignore=["**/__pycache__"])
    .add_local_file(ROOT / "pyproject.toml", "/src/pyproject.toml", copy=True)
    .add_local_file(ROOT / "README.md", "/src/README.md", copy=True)
    .add_local_file(ROOT / "LICENSE", "/src/LICENSE", copy=True)
    .add_local_file(ROOT / "NOTICE", "/src/NOTICE", copy=True)
    .run_commands("pip install --no-deps /src", warm_command())
)
weights = modal.Volume.from_name(
    "huggingface-cache", create_if_missing=True
)  # the guide's: nothing is downloaded again
secrets = [modal.Secret.from_name(name) for name in [os.environ.get("CHORALE_SECRET")] if name]

app = modal.App("example-gpt-oss-inference")


@app.function(
    image=image,
    gpu=f"{GPU}:{N_GPU}",
    scaledown_window=10 * MINUTES,
    timeout=30 * MINUTES,
    volumes={"/root/.cache/huggingface": weights},
    secrets=secrets,
)
@modal.concurrent(max_inputs=MAX_INPUTS)
@modal.web_server(port=PORT, startup_timeout=30 * MINUTES)
def serve() -> None:
    subprocess.Popen(command())


@app.local_entrypoint()
def ask(question: str = "Explain what the singular value decomposition is.") -> None:
    """Asks the deployed server, once with each reasoning effort of two."""
    url = serve.get_web_url()
    with urllib.request.urlopen(f"{url}/health", timeout=29 * MINUTES):
        print(f"{url} is up")
    for effort in ("low", "medium"):
        messages = [{"role": "user", "content": question}]
        body = {"model": "llm", "messages": messages, "stream": True, "reasoning_effort": effort}
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("CHORALE_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
        print(f"\n--- reasoning effort {effort}")
        with urllib.request.urlopen(request, timeout=10 * MINUTES) as lines:
            for line in lines:
                if line.startswith(b"data: {"):
                    delta = json.loads(line[6:])["choices"][0]["delta"]
                    print(delta.get("content") or delta.get("reasoning_content") or "", end="", flush=True)
    print()
