"""The process that reads one PDF file: the file on standard input, a JSON report on standard output.

The file is a stranger's. The process limits its own time, memory and files before it looks at it.
"""

from __future__ import annotations

import io
import json
import sys
from typing import Any, NamedTuple

from chorale.machine.processes import die_with_parent


class Limits(NamedTuple):
    cpu_seconds: int = 20
    memory_bytes: int = 512 * 2**20
    pages: int = 1000
    characters: int = 1_000_000


LIMITS = Limits()


def main() -> None:
    parent_pid, values = json.loads(sys.argv[1])
    limits = Limits(*values)
    die_with_parent(parent_pid)
    restrict(limits)
    data = sys.stdin.buffer.read()
    try:
        report = read(data, limits)
    except MemoryError:
        report = {"error": "the PDF file needs too much memory"}
    except Exception as error:  # pypdf raises many kinds for damaged files
        report = {"error": f"the PDF file is damaged ({type(error).__name__})"}
    sys.stdout.write(json.dumps(report))


def restrict(limits: Limits) -> None:
    import resource

    sys.setrecursionlimit(600)
    for which, most in (
        (resource.RLIMIT_CPU, limits.cpu_seconds),
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        try:
            resource.setrlimit(which, (most, most))
        except (ValueError, OSError):  # macOS has no limit of the address space
            if which != resource.RLIMIT_AS:
                raise


def read(data: bytes, limits: Limits) -> dict[str, Any]:
    """Returns {"text"} or {"error"}. Raises what pypdf raises."""
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError, LimitReachedError

    reader = PdfReader(io.BytesIO(data))
    try:
        if reader.is_encrypted and not reader.decrypt(""):
            return {"error": "the PDF file has a password"}
        count = len(reader.pages)
        if count > limits.pages:
            return {"error": f"the PDF file has {count} pages; at most {limits.pages} are read"}
        pages, length = [], 0
        for page in reader.pages:
            pages.append(page.extract_text().strip())
            length += len(pages[-1])
            if length > limits.characters:
                return {"error": f"the PDF file has more than {limits.characters} characters of text"}
    except (DependencyError, FileNotDecryptedError):
        return {"error": "the PDF file is encrypted"}
    except LimitReachedError:
        return {"error": "a part of the PDF file is too large to read"}
    text = "\n\n".join(page for page in pages if page)
    # Lone surrogates of broken fonts, which no tokenizer takes.
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\x00", "")
    return {"text": text} if text else {"error": "the PDF file has no text: its pages are pictures"}


if __name__ == "__main__":
    main()
