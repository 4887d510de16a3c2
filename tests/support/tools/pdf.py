"""Small PDF files."""

from __future__ import annotations


def pdf(*pages: str, stream: bytes | None = None, filters: bytes = b"") -> bytes:
    """Returns a PDF file with a line of text on each page, or with one page whose content is ``stream``."""
    contents = [f"BT /F1 12 Tf 72 720 Td ({page}) Tj ET".encode() for page in pages]
    if stream is not None:
        contents = [stream]
    kids = b" ".join(b"%d 0 R" % (4 + 2 * number) for number in range(len(contents)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, len(contents)),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, content in enumerate(contents):
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> >> >>" % (5 + 2 * number)
        )
        objects.append(b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(content), filters, content))
    data, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(objects) + 1
    return (
        data + b"xref\n0 %d\n0000000000 65535 f \n%s" % (size, table)
        + b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (size, len(data))
    )  # fmt: skip
