"""Copies the browser libraries of the chat page from their npm packages into chorale.

    python scripts/vendor_page_libraries.py          fetches the packages with `npm pack`, writes the files
    python scripts/vendor_page_libraries.py --check  exits 1 if the files differ from the packages'

The digest of each package is pinned below, so the same bytes come out everywhere. For another version, change
its line: `npm view NAME@VERSION dist.integrity` prints the digest.
"""

from __future__ import annotations

import io
import re
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

from vendor_docs_page import fetch

FOLDER = Path(__file__).resolve().parents[1] / "chorale" / "api" / "operator" / "page" / "static" / "vendor"


class Package(NamedTuple):
    name: str
    version: str
    integrity: str
    files: dict[str, str] = {}  # noqa: RUF012  # from the name in the package to the name here
    licence: str = "LICENSE"


PACKAGES = (
    Package(
        "markdown-it", "15.0.3",
        "sha512-+Az7Ojz3iRGu8KYMvJ6xVhvrxP3eE+vEtJX75Ow88XBpcQNV/0lGX5ZynIIBftREo4DC2jsveAMDaeltmm8QvQ==",
        {"dist/browser/markdown-it.esm.min.mjs": "markdown-it.js"},
    ),
    Package(
        "@highlightjs/cdn-assets", "11.12.0",
        "sha512-KvOKXODaiFmId9xaq3xc5xCL66wVLUuOngDbO9B/kewbFTqdGbn2nJxNhN3H5R1cgDTVj6R8vH0zgiNDEGjpDw==",
        {"es/highlight.min.js": "highlight.js"},
    ),
    Package(
        "katex", "0.19.1",
        "sha512-jG8uKntjSEcm2EpQOh0XturpPuuC9r3Sq5HLHdsFdWZT27E672SF19QEi+of0/YeOy15lDgRhKvr5614uRrEfA==",
        {"dist/katex.min.js": "katex.js", "dist/katex.min.css": "katex.css"},
    ),
    # These are parts of markdown-it's file: only their licences are copied.
    Package(
        "entities", "8.1.0",
        "sha512-kxL7msIffSuh9aaFAMD7rxAIuTRMAHMeBtgHW2yUdWw732ZNh4MehkF2gdjvtdmikkaIP9bFDDJOPlsvm7avrA==",
    ),
    Package(
        "linkify-it", "6.1.0",
        "sha512-wJ/TwpSDTLepCrQoYWYIExIKg5Zchex2Nn5yk2mFnB+6PtdkHtyLx742md9csRjjOnGkKIS/RrbY7l8D6gT9Vw==",
    ),
    Package(
        "mdurl", "2.1.0",
        "sha512-1+HBaOx0zi/dQWht8rNv9MYf9qqpqL/kxI0hXImU6Y547zM6Sni8BQibt7ifgMcYtQg41ao3Ivd6cnSM86inpg==",
    ),
    Package(
        "punycode.js", "2.3.1",
        "sha512-uxFIHU0YlHYhDQtV4R9J6a52SLx28BCjT+4ieh7IGbgwVJWO+km431c4yRlREUAsAmt/uMjQUyQHNEPf0M39CA==",
        licence="LICENSE-MIT.txt",
    ),
    Package(
        "uc.micro", "3.0.0",
        "sha512-U3PppEkleoTnIfi8BozMx3yju3qc/L6SwqWo2Sw+54PX+PX0q9I+r1Um5HCmqD7n9VDX5/v3vQH/AjA6deDdtw==",
        licence="LICENSE.txt",
    ),
)  # fmt: skip
_FONTS = re.compile(r"package/dist/(fonts/[\w-]+\.woff2)")
_OTHER_FONTS = re.compile(rb',url\([^)]*\) format\("(?:woff|truetype)"\)')
_SOURCE_MAP = re.compile(rb"\n//# sourceMappingURL=.*\s*$")


def made() -> dict[str, bytes]:
    """Returns the content of every file to write, by name."""
    files: dict[str, bytes] = {}
    licences = []
    for package in PACKAGES:
        content = _unpacked(fetch(package.name, package.version, package.integrity))
        for source, target in package.files.items():
            files[target] = _OTHER_FONTS.sub(b"", _SOURCE_MAP.sub(b"\n", content[f"package/{source}"]))
        for name in content:
            if found := _FONTS.fullmatch(name):
                files[found[1]] = content[name]
        text = content[f"package/{package.licence}"].decode().strip()
        licences.append(f"{package.name} {package.version}\n\n{text}\n")
    files["LICENSES.txt"] = f"\n{'-' * 72}\n\n".join(licences).encode()
    return files


def _unpacked(package: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        return {
            member.name: file.read()
            for member in archive
            if (file := archive.extractfile(member)) is not None
        }


def main() -> int:
    wrong = []
    for name, content in made().items():
        path = FOLDER / name
        if "--check" not in sys.argv[1:]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        elif not path.exists() or path.read_bytes() != content:
            wrong.append(name)
    for name in wrong:
        print(f"{name} differs from its package's")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
