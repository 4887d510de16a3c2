"""Several hundred random requests, also about stored objects: none gets a 5xx, hangs, or is answered badly.

The long run is ``python scripts/fuzz_api.py --requests 20000``.
"""

from __future__ import annotations


def test_no_request_breaks_the_server() -> None:
    # Imported here because schemathesis takes a second to import, and every worker collects this file.
    from tests.support.fuzz.api_fuzzer import SOUND, fuzz

    found = fuzz(800, 7)
    assert not found.faults, "\n".join(f"{kind}\n  {shown}" for kind, shown in found.faults.items())
    assert sum(found.statuses.values()) >= 700
    assert found.statuses[200] > 30
    assert found.statuses[400] > 30
    # Some requests drawn by schemathesis must be answered; otherwise they would test only the validation.
    assert sum(found.drawn[path] for path in SOUND) >= 4, found.drawn
