"""Temporary folders are removed by their owner or by the next process; other folders stay."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from chorale.machine.folders import PREFIX, Folder, folder_for_sockets, sweep

MAKE_FOLDER = (
    "import sys; from chorale.machine.folders import Folder; "
    "f = Folder(sys.argv[1]); (f.path / 'engine').touch(); "
)
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no locks on folders")


def owner(parent: Path) -> subprocess.Popen[str]:
    """Starts a process that owns a folder in ``parent``."""
    code = MAKE_FOLDER + "print(f.path, flush=True); sys.stdin.read()"
    return subprocess.Popen(
        [sys.executable, "-c", code, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_a_folder_is_private_and_ends_with_its_block(tmp_path: Path) -> None:
    with Folder(tmp_path) as path:
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "file").touch()
    assert not path.exists()


def test_the_folder_of_a_killed_process_is_removed_by_the_next_process(tmp_path: Path) -> None:
    process = owner(tmp_path)
    left = Path(process.stdout.readline().strip())
    with Folder(tmp_path) as path:
        assert left.exists()  # its owner runs
        process.kill()
        process.communicate()
        sweep(tmp_path)
        assert not left.exists()
        assert path.exists()  # the new folder of this process


def test_a_folder_of_any_depth_is_removed(tmp_path: Path) -> None:
    code = MAKE_FOLDER + (
        "import os; os.chdir(f.path)\n"
        "open('file', 'w').close()\n"
        "for _ in range(1100): os.mkdir('d'); os.chdir('d')\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_files_and_folders_of_others_stay(tmp_path: Path) -> None:
    other_name, other_mode = tmp_path / "chorale-notes", tmp_path / f"{PREFIX}abcdefgh"
    file, link = tmp_path / f"{PREFIX}abcdefg1", tmp_path / f"{PREFIX}abcdefg2"
    for folder in (other_name, other_mode):
        folder.mkdir(mode=0o755)
        (folder / "file").touch()
    file.touch()
    link.symlink_to(other_name)
    sweep(tmp_path)
    assert all(path.exists() for path in (other_name / "file", other_mode / "file", file, link))


def test_an_unlocked_folder_is_removed_only_if_it_is_old(
    tmp_path: Path,
) -> None:
    fresh, old = tmp_path / "chorale-new-aaaaaaaa", tmp_path / "chorale-new-bbbbbbbb"
    for folder in (fresh, old):
        folder.mkdir(mode=0o700)
    hour_ago = time.time() - 3600
    os.utime(old, (hour_ago, hour_ago))
    sweep(tmp_path)
    assert fresh.exists()
    assert not old.exists()


def test_a_folder_whose_socket_path_is_too_long_is_skipped(tmp_path: Path) -> None:
    short, deep = tmp_path / "s", tmp_path / ("d" * 80)
    short.mkdir()
    deep.mkdir()
    with tempfile.TemporaryDirectory(dir="/tmp") as last:
        found = folder_for_sockets((None, str(short / "missing"), str(deep), last), "http.sock")
        assert found is not None
        with found as path, contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
            assert path.parent == Path(last)
            listener.bind(str(path / "http.sock"))
    assert list(deep.iterdir()) == []
    assert folder_for_sockets((str(deep),), "http.sock") is None
