"""Products of many tokens on AMX tiles: against float64, at the number of tokens at which they begin, and
where a process may not use them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from chorale.kernels.cpu.experts import CpuExperts
from chorale.kernels.cpu.linear import CpuLinear
from tests.kernels.cpu.conftest import Use
from tests.kernels.experts import expected_sum, make_experts

FEWEST4, FEWEST8 = 6, 9  # tokens of an expert, and of a dense product: kFewest4 and kFewest8 in native/


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def counted(*counts: int) -> torch.Tensor:
    """Expert ids [T, 1] such that expert e has counts[e] tokens, in a random order."""
    ids = torch.cat([torch.full((count,), expert) for expert, count in enumerate(counts)])
    return ids[torch.randperm(len(ids))][:, None]


@pytest.mark.parametrize(
    "counts", [(5, 6, 7), (15, 16, 17), (0, 33, 1), (31, 0, 32), (130, 5, 260)], ids=lambda each: str(each)
)
@pytest.mark.parametrize(("hidden", "inter"), [(96, 160), (32, 32), (288, 64)])
def test_experts_of_any_number_of_tokens(use: Use, counts: tuple[int, ...], hidden: int, inter: int) -> None:
    """A wrong scale of one of 9 blocks would be an error of 0.3."""
    tensors = make_experts(len(counts), hidden, inter)
    ids = counted(*counts)
    normed, x = torch.randn(len(ids), hidden), torch.randn(len(ids), hidden)
    gates = torch.rand(len(ids), 1)
    expected = expected_sum(tensors, normed, ids, gates) + x
    found = CpuExperts(tensors, "int8")(normed, ids, gates, x.clone())
    many = torch.tensor(counts)[ids[:, 0]] >= FEWEST4
    assert relative(found[many], expected[many]) < 0.003
    assert many.all() or relative(found[~many], expected[~many]) < 0.02
    exact = CpuExperts(tensors, "exact")(normed, ids, gates, x.clone())
    assert relative(exact, expected) < 1e-5


def test_tiles_are_used(use: Use) -> None:
    """Their inputs have an error several times smaller; without them all this would test AVX-512."""
    tensors, ids = make_experts(2, 2880, 64), counted(40, 40)
    normed, gates = torch.randn(80, 2880), torch.ones(80, 1)
    expected = expected_sum(tensors, normed, ids, gates)
    errors = []
    for name in ("amx", "avx512_vnni"):
        use(name)
        found = CpuExperts(tensors, "int8")(normed, ids, gates, torch.zeros(80, 2880))
        errors.append(relative(found, expected))
    assert errors[0] < errors[1] / 2


def test_a_token_among_several_experts(use: Use) -> None:
    """Pairs with many and with few tokens of one token add up; ids beyond the experts add nothing."""
    tensors = make_experts(6, 64, 96)
    normed, gates, zeros = torch.randn(50, 64), torch.rand(50, 3), torch.zeros(50, 64)
    ids = torch.stack([torch.full((50,), 4), torch.arange(50) % 2, 2 + torch.arange(50) // 48], dim=1)
    ids[:45, 2] = 6
    layer = CpuExperts(tensors, "int8")
    found = layer(normed, ids, gates, zeros.clone())
    gates[:45, 2], ids[:45, 2] = 0.0, 0
    assert relative(found, expected_sum(tensors, normed, ids, gates)) < 0.01


def test_scales_at_their_ends(use: Use) -> None:
    """0 is too small to count, 255 is NaN, and only in its own rows."""
    tensors = make_experts(1, 64, 64)
    assert tensors.down_scales is not None
    tensors.down_scales[0, 3], tensors.down_scales[0, 40, 1], tensors.down_scales[0, 5] = 0, 255, 200
    ids = counted(20)
    normed, gates = torch.randn(20, 64), torch.ones(20, 1)
    found = CpuExperts(tensors, "int8")(normed, ids, gates, torch.zeros(20, 64))
    assert torch.equal(found[:, 3], tensors.down_bias[0, 3].expand(20))
    assert found[:, 40].isnan().all()
    assert found[:, 5].abs().max() > 1e22
    kept = torch.ones(64, dtype=torch.bool)
    kept[40] = False
    assert found[:, kept].isfinite().all()


def test_few_tokens_have_the_bits_of_avx512(use: Use) -> None:
    tensors, weight = make_experts(3, 96, 64), torch.randn(70, 100)
    found = []
    for name in ("amx", "avx512_vnni"):
        use(name)
        torch.manual_seed(1)
        ids, x = counted(FEWEST4 - 1, 0, 2), torch.randn(FEWEST8 - 1, 100)
        normed, gates = torch.randn(len(ids), 96), torch.rand(len(ids), 1)
        moe = CpuExperts(tensors, "int8")(normed, ids, gates, torch.zeros(len(ids), 96))
        found.append((moe, CpuLinear(weight, None, "int8")(x)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_many_tokens_have_the_same_bits_in_any_batch(use: Use) -> None:
    """Only whether there are as many as tiles need makes a difference."""
    torch.manual_seed(2)
    layer, x = CpuLinear(torch.randn(70, 100), torch.randn(70), "int8"), torch.randn(300, 100)
    experts, ids = CpuExperts(make_experts(1, 96, 64), "int8"), counted(300)
    normed, gates, zeros = torch.randn(300, 96), torch.rand(300, 1), torch.zeros(300, 96)
    dense, moe = layer(x), experts(normed, ids, gates, zeros.clone())
    for begin, count in ((0, FEWEST8), (3, 40), (250, 17), (128, 172)):
        part = slice(begin, begin + count)
        assert torch.equal(layer(x[part]), dense[part])
        assert torch.equal(experts(normed[part], ids[part], gates[part], zeros[part].clone()), moe[part])
    part = slice(FEWEST4)
    assert torch.equal(experts(normed[part], ids[part], gates[part], zeros[part].clone()), moe[part])
    part = slice(FEWEST4 - 1)
    assert not torch.equal(experts(normed[part], ids[part], gates[part], zeros[part].clone()), moe[part])
    assert not torch.equal(layer(x[: FEWEST8 - 1]), dense[: FEWEST8 - 1])


def test_a_fork_has_tiles_too(use: Use) -> None:
    """Linux: the permission is inherited; the threads of the parent are not there."""
    layer, x = CpuLinear(torch.randn(64, 96), None, "int8"), torch.randn(33, 96)
    expected = layer(x)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(layer(x), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


REFUSED = """
import ctypes, struct
# A filter of system calls: arch_prctl (158) with ARCH_REQ_XCOMP_PERM (0x1023) returns EINVAL, as before 5.16.
code = [(0x20, 0, 0, 0), (0x15, 0, 3, 158), (0x20, 0, 0, 16), (0x15, 0, 1, 0x1023), (0x06, 0, 0, 0x50016),
        (0x06, 0, 0, 0x7FFF0000)]
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
given = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(program))
prctl = ctypes.CDLL(None, use_errno=True).prctl
prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_ulong]
assert prctl(38, 1, None, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
if prctl(22, 2, given, 0, 0) != 0:  # PR_SET_SECCOMP
    print("no filters")
else:
    from chorale.kernels.cpu.library import library
    print(library().name or library().why_not)
"""


@pytest.mark.parametrize(
    ("asked", "answer"), [(None, "avx512_vnni"), ("amx", "CHORALE_CPU_ISA=amx: this processor has no such")]
)
def test_without_the_permission_there_are_no_tiles(use: Use, asked: str | None, answer: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CHORALE_CPU_ISA"}
    if asked is not None:
        environment["CHORALE_CPU_ISA"] = asked
    command = [sys.executable, "-c", REFUSED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    if done.stdout.strip() == "no filters":
        pytest.skip("this system lets a process filter no system calls")
    assert done.stdout.startswith(answer)
