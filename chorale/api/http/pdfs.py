"""Replaces the PDF files in a request by their text, before the request is converted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chorale.api.http.offload import beside
from chorale.errors import invalid
from chorale.requests.files import pdf_parts
from chorale.tools.pdf.reader import MAX_FILES, PdfReader


async def read_pdfs(reader: PdfReader, messages: Sequence[Any], path: str, *, heavy: bool) -> None:
    """Turns parts with PDF files into parts with their text, in place. Raises ``RequestError``.

    ``path``: the name of ``messages`` in the request. ``heavy``: whether they are too long to walk at once.
    """
    found = await beside(lambda: list(pdf_parts(messages, path)), heavy=heavy)
    if len(found) > MAX_FILES:
        raise invalid(found[MAX_FILES].param, f"a request may have at most {MAX_FILES} PDF files")
    for each in found:
        data = await beside(each.data, heavy=heavy)
        each.become(await reader.text(data, each.param))
