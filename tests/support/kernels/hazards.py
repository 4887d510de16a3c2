"""Finds machine code that overwrites a register while wgmma still reads it.

wgmma reads its first operand from registers long after it was issued: they must not be written until a wait
shows that its group is done. Triton's compiler once violated this across a loop's end, and results were
occasionally wrong. ``compile_kernels.py`` uses this module for sm_90.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton

_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,5})\*/\s+(.*?)\s*;")
_NO_RESULT = ("ST", "SYNCS", "BAR", "BRA", "RED", "UTMA", "WARP")

Instruction = tuple[int, str]  # (address, text without its predicate)


def disassemble(cubin: bytes) -> str:
    """Disassembles a cubin with the tool in Triton's package."""
    return _cuobjdump("--dump-sass", cubin)


def resources(cubin: bytes) -> dict[str, int]:
    """Returns what a kernel takes: REG (registers per thread), SHARED (bytes that are not requested at its
    launch), STACK and others, as ptxas counted them."""
    text = _cuobjdump("--dump-resource-usage", cubin).partition("Function")[2]
    return {name: int(count) for name, count in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}


def _cuobjdump(what: str, cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, what, file.name], capture_output=True, text=True, check=True)
    return done.stdout


def overwritten(sass: str) -> list[str]:
    """Returns instructions that write a register of a product in flight, also across each loop's end."""
    found = [_LINE.match(line) for line in sass.splitlines()]
    code = [(int(m[1], 16), re.sub(r"^@!?U?P\w+ ", "", m[2])) for m in found if m]
    places = {address: place for place, (address, _) in enumerate(code)}
    assert any("GMMA" in text for _, text in code), "there is no product in this code"
    bad = _walk(code)
    for place, (address, text) in enumerate(code):
        jump = re.search(r"BRA (0x[0-9a-f]+)", text)
        start = places.get(int(jump[1], 16)) if jump and int(jump[1], 16) < address else None
        if start is not None:
            loop = code[start : place + 1]
            bad += _walk(loop + loop)
    return bad


def _walk(code: list[Instruction]) -> list[str]:
    current: set[int] = set()  # registers of products issued since the last commit
    groups: list[set[int]] = []
    bad = []
    for address, text in code:
        product = re.search(r"[HQ]GMMA\S+ R\d+, (?:R(\d+)|gdesc)", text)
        wait = re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", text)
        if product:
            if product[1] is not None:
                current |= set(range(int(product[1]), int(product[1]) + 4))
            if "gsb0" in text:
                groups.append(current)
                current = set()
        elif wait:
            groups = groups[len(groups) - int(wait[1]) :] if int(wait[1]) else []
        elif _written(text) & current.union(*groups):
            bad.append(f"{address:#x} {text}")
    return bad


def _written(text: str) -> set[int]:
    result = re.match(r"\S+ (?:P\d, )?R(\d+)", text)
    if result is None or text.startswith(_NO_RESULT):
        return set()
    name = text.split()[0]
    width = 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1
    return set(range(int(result[1]), int(result[1]) + width))
