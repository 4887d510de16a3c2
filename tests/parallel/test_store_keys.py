"""Exchanges of symmetric memory are numbered from 0 by every engine, however many the process had before."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from chorale.parallel.distributed import KeysFromZero


def test_a_process_that_has_counted_on_meets_one_that_begins(tmp_path: Path) -> None:
    """Through torch's own code, which calls the store as symmetric memory does."""
    file = str(tmp_path / "store")
    kept = [KeysFromZero(dist.FileStore(file, 2)) for _ in range(2)]  # torch keeps only its own part
    old, new = (dist.PrefixStore("peers", each) for each in kept)
    for number in range(3):
        old.set(f"CUDASymmetricMemory/{8 + number}/0", f"old {number}")
        new.set(f"CUDASymmetricMemory/{number}/1", f"new {number}")
        new.wait([f"CUDASymmetricMemory/{number}/0"])
        assert new.get(f"CUDASymmetricMemory/{number}/0") == f"old {number}".encode()
        assert old.get(f"CUDASymmetricMemory/{8 + number}/1") == f"new {number}".encode()


def test_kinds_are_numbered_apart_and_other_keys_pass(tmp_path: Path) -> None:
    file = str(tmp_path / "store")
    store, plain = KeysFromZero(dist.FileStore(file, 1)), dist.FileStore(file, 1)
    for key in ("a/5/0", "b/2/0", "a/6/1", "name", "a/b", "x/y/1"):
        store.set(key, key)
    assert store.check(["a/5/0", "b/2/0"])
    for key, written in (("a/0/0", "a/5/0"), ("b/0/0", "b/2/0"), ("a/1/1", "a/6/1")):
        assert plain.get(key) == written.encode()
    for key in ("name", "a/b", "x/y/1"):
        assert plain.get(key) == key.encode()
