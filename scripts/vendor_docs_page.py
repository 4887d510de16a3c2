"""Copies the files of Swagger UI that /docs serves from its npm package into chorale, compressed.

    python scripts/vendor_docs_page.py           fetches the package with `npm pack` and writes the files
    python scripts/vendor_docs_page.py --check   exits 1 if the files differ from the package's

The package's digest is pinned below, so the same bytes come out everywhere. For another version, change both
lines: `npm view swagger-ui-dist@VERSION dist.integrity` prints the digest.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "5.35.0"
INTEGRITY = "sha512-U06rpMtW9V3XPGOBeamTUSr0Z09jMX4IJuANpE/EZbAhw0G8CgwrzU4YmXkn/h0wCDNsXdGarTNNHC3sU8yVUQ=="
FOLDER = Path(__file__).resolve().parents[1] / "chorale" / "api" / "operator" / "docs"
COMPRESSED = ("swagger-ui-bundle.js", "swagger-ui.css")
# Swagger UI has Chorale's licence, Apache 2.0; these files name the authors of the bundle and its contents.
PLAIN = {
    "NOTICE": "swagger-ui.NOTICE.txt",
    "swagger-ui-bundle.js.LICENSE.txt": "swagger-ui-bundle.js.LICENSE.txt",
}


def fetch(name: str, version: str, integrity: str) -> bytes:
    """Returns a package of npm. Raises ``SystemExit`` if it does not have this digest."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            ["npm", "pack", "--silent", f"{name}@{version}"],
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        data = next(Path(folder).glob("*.tgz")).read_bytes()
    found = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
    if found != integrity:
        raise SystemExit(f"{name}@{version} is {found}, not {integrity}")
    return data


def made(package: bytes) -> dict[str, bytes]:
    """Returns the content of every file to write, by name."""
    files: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:

        def read(name: str) -> bytes:
            member = archive.extractfile(f"package/{name}")
            assert member is not None
            return member.read()

        for name in COMPRESSED:
            # Leave out the line that points to a source map, which is not served.
            lines = read(name).splitlines(keepends=True)
            content = b"".join(line for line in lines if b"sourceMappingURL=" not in line[:24])
            files[f"{name}.gz"] = gzip.compress(content, 9, mtime=0)
        for name, target in PLAIN.items():
            files[target] = read(name)
    return files


def main() -> int:
    wrong = []
    for name, content in made(fetch("swagger-ui-dist", VERSION, INTEGRITY)).items():
        path = FOLDER / name
        if "--check" not in sys.argv[1:]:
            path.write_bytes(content)
        elif not path.exists() or _content(path.read_bytes()) != _content(content):
            wrong.append(name)
    for name in wrong:
        print(f"{name} differs from swagger-ui-dist@{VERSION}")
    return 1 if wrong else 0


def _content(data: bytes) -> bytes:
    """Returns the uncompressed content, since zlib's output may differ from one build to the next."""
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


if __name__ == "__main__":
    sys.exit(main())
