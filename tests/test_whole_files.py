"""Commands write files completely or not at all, and an error names the file.

A limit on the file size stands in for a full disk, since it needs no privileges.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from chorale.machine.folders import write_whole

MOST = 50_000  # maximum bytes of a file


def limited(*command: str, most: int = MOST) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, check=False, preexec_fn=limit
    )


# The demo's tables take seconds; the archive's other tensors alone are longer than the limit.
SMALL_TABLES = (
    "import sys, torch\nfrom chorale.model.demo import archive\n"
    "archive.feature_parts = lambda tokens: None\n"
    "archive.tables = lambda parts, tensors: [torch.zeros(1), torch.zeros(1)]\n"
)
EXPORT = "import sys; from chorale.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize(("command", "before"), [("vocab", ""), ("demo", SMALL_TABLES)])
def test_a_failed_export_names_the_folder_and_leaves_no_file(
    command: str, before: str, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    done = limited("-B", "-c", before + EXPORT, command, "export", str(folder))
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert str(folder) in done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


PROGRAMS = {
    "write_whole": "write_whole(folder / 'file', b'x' * 100_000)",
    "a report": "write_whole(folder / 'file', 'ü' * 100_000)",
    "records of eval": "log = Journal(folder)\nfor _ in range(100): log.append(RECORD)",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_error_names_the_file(name: str, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from chorale.errors import ChoraleError\n"
        "from chorale_evals.journal import Journal\n"
        "from chorale.machine.folders import write_whole\n"
        "from chorale_evals.record import Record\n"
        "RECORD = Record('t', 'low', 's', 1, 'answered', 1.0, 'x' * 9000)\n"
        "folder = Path(sys.argv[1])\n"
        f"try:\n    {PROGRAMS[name].replace(chr(10), chr(10) + '    ')}\n"
        "except (OSError, ChoraleError) as error: print(error)\n"
    )
    done = limited("-B", "-c", code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout
    assert "large" in done.stdout  # the system's text of EFBIG


def test_a_file_is_replaced_whole_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    code = (
        "import sys; from pathlib import Path; from chorale.machine.folders import write_whole\n"
        "write_whole(Path(sys.argv[1]), 'x' * 100_000)"
    )
    assert limited("-B", "-c", code, str(tmp_path / "link")).returncode != 0
    assert (tmp_path / "file").read_text() == "old"
    write_whole(tmp_path / "link", "new ü")
    assert (tmp_path / "file").read_text("utf-8") == "new ü"
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_a_pipe_is_written_to_directly(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE)
    write_whole(tmp_path / "pipe", b"through")
    assert reader.communicate(timeout=60)[0] == b"through"
    assert os.listdir(tmp_path) == ["pipe"]
