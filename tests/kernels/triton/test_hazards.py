"""``hazards.py`` finds what it is for, and nothing else."""

from __future__ import annotations

import importlib.util

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def code(*instructions: str) -> str:
    return "\n".join(
        f"        /*{16 * n:04x}*/     {text} ;  /* 0x0 */" for n, text in enumerate(instructions)
    )


PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R152, gdesc[UR8], R24, gsb0"
WAIT_ALL, WAIT_BUT_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"
OTHER = "HGMMA.64x64x16.F32.BF16 R24, R160, gdesc[UR8], R24, gsb0"


@pytest.mark.parametrize(
    ("instructions", "count"),
    [
        ([PRODUCT, "IMAD R155, R1, R2, R3", WAIT_ALL], 1),
        ([PRODUCT, "@P0 LDS.128 R150, [R4]", WAIT_ALL], 1),  # 150 .. 153
        ([PRODUCT, WAIT_ALL, "IMAD R155, R1, R2, R3"], 0),
        ([PRODUCT, OTHER, WAIT_BUT_ONE, "IMAD R155, R1, R2, R3", WAIT_ALL], 0),
        ([PRODUCT, OTHER, WAIT_BUT_ONE, "IMAD R160, R1, R2, R3", WAIT_ALL], 1),
        ([PRODUCT, "STS [R155], R152", "IMAD R156, R1, R2, R3", WAIT_ALL], 0),
        (["IMAD R155, R1, R2, R3", PRODUCT, WAIT_BUT_ONE, "@!P0 BRA 0x0", WAIT_ALL], 1),  # in the next turn
    ],
)
def test_hazards_are_found(instructions: list[str], count: int) -> None:
    from tests.support.kernels.hazards import overwritten

    assert len(overwritten(code(*instructions))) == count
