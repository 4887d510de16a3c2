"""Compiles ``native/`` to a shared library: ``python -m chorale.kernels.cpu.build``.

Called when the package is built (``hatch_build.py``), so it imports only the standard library. The library
does not depend on Python or torch: one build works with every version of both. Each instruction set is a
translation unit with its own compiler flags; one of them is selected when the library is loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "native"
LIBRARY = HERE / "libchorale_cpu.so"
COMMON = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math",
    "-Wall", "-Wextra", "-Wno-psabi",
    # GCC 12 warns about "undefined" vectors in its own headers.
    "-Wno-uninitialized", "-Wno-maybe-uninitialized",
)  # fmt: skip
Flags = dict[str, tuple[str, ...]]
AVX2 = ("-mavx2", "-mfma")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
AMX = ("-mavx512vbmi", "-mavx512bf16", "-mamx-tile", "-mamx-bf16")
WIDE = "-mprefer-vector-width=512"
X86: Flags = {
    "avx2": AVX2,
    "avxvnni": (*AVX2, "-mavxvnni"),
    "avx512": (*AVX2, *AVX512, WIDE),
    "amx": (*AVX2, *AVX512, WIDE, *AMX),
}
ARM: Flags = {"neon": ("-march=armv8.2-a+dotprod",), "i8mm": ("-march=armv8.2-a+dotprod+i8mm",)}


def sources_digest() -> str:
    """Return a digest of the sources, so that a library of other sources is not used."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*.*")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class BuildError(Exception):
    """The library could not be built; the message has the reason."""


def compiler() -> list[str]:
    """Return the C++ compiler: ``CXX``, or the first on the path. Raises ``BuildError``."""
    if given := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(given[0]) is None:
            raise BuildError(f"CXX names {given[0]}, which is not there")
        return given
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise BuildError("no C++ compiler was found (c++, g++, clang++, or the variable CXX)")


def instruction_sets(machine: str) -> Flags:
    """Returns the compiler flags of each instruction set that this kind of machine may have."""
    if machine in ("x86_64", "amd64"):
        return X86
    if machine in ("aarch64", "arm64"):
        return ARM
    return {}


def build(
    out: Path = LIBRARY, extra: tuple[str, ...] = (), machine: str | None = None, program: Path | None = None
) -> list[str]:
    """Builds ``out`` and returns its instruction sets. Those that the compiler does not support are left out.
    ``program``: a source file with ``main``, to build a program instead. Raises ``BuildError``."""
    cxx, flags = compiler(), (*COMMON, *extra)
    sets = instruction_sets((machine or platform.machine()).lower())
    with tempfile.TemporaryDirectory(prefix="chorale-build-") as folder:
        objects = Path(folder)
        known = [name for name in sets if _accepts(cxx, sets[name], objects)]
        has = [f"-DHAS_{name.upper()}" for name in known] + [f'-DSOURCES="{sources_digest()}"']
        jobs = [(f"isa_{name}", (*flags, *sets[name])) for name in known]
        jobs += [("isa_generic", flags), ("pool", flags), ("library", (*flags, *has))]
        with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
            made = list(threads.map(lambda job: _compile(cxx, job[0], job[1], objects), jobs))
        linked, kind = objects / out.name, ["-shared"]
        if program is not None:
            made.append(str(program))
            kind = ["-std=c++17", f"-I{SOURCES}"]
        _run([*cxx, *kind, "-pthread", *extra, "-o", str(linked), *made])
        temporary = out.with_name(f"{out.name}.{os.getpid()}")
        shutil.copy(linked, temporary)
        temporary.replace(out)  # processes that have mapped the old file keep it
    return [*known, "generic"]


def _accepts(cxx: list[str], flags: tuple[str, ...], folder: Path) -> bool:
    source = folder / "empty.cpp"
    source.write_text("int main() { return 0; }\n")
    command = [*cxx, *flags, "-Werror", "-c", str(source), "-o", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _compile(cxx: list[str], name: str, flags: tuple[str, ...], folder: Path) -> str:
    made = str(folder / f"{name}.o")
    _run([*cxx, *flags, "-c", str(SOURCES / f"{name}.cpp"), "-o", made])
    return made


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise BuildError(f"{command[0]}: {next((line for line in said if 'error' in line), said[-1])}")


if __name__ == "__main__":
    try:
        print(f"built {LIBRARY.name} with {', '.join(build())}")  # noqa: T201
    except BuildError as error:
        sys.exit(f"chorale's CPU kernels were not built: {error}")
