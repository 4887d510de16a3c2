"""A tracer that keeps its spans, for tests of recorded spans without OpenTelemetry's packages."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chorale.tracing.otel import SpanKind, Value


@dataclass
class KeptSpan:
    tracer: KeptTracer
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent: KeptSpan | None
    attributes: dict[str, Any]
    error: str | None = None
    num_ends: int = 0

    @property
    def is_recording(self) -> bool:
        return self.num_ends == 0 and self.tracer.samples

    def set(self, attributes: Mapping[str, Value | None]) -> None:
        assert self.num_ends == 0, f"{self.name}: an attribute after the end is lost"
        self.attributes |= {key: value for key, value in attributes.items() if value is not None}

    def rename(self, name: str) -> None:
        self.name = name

    def child(self, name: str, attributes: Mapping[str, Value | None]) -> KeptSpan:
        return self.tracer.begin(name, "internal", self.trace_id, self, attributes)

    def headers(self) -> dict[str, str]:
        return {"traceparent": f"00-{self.trace_id}-{self.span_id}-01", "tracestate": "vendor=secret"}

    def fail(self, kind: str) -> None:
        self.error = kind

    def end(self) -> None:
        self.num_ends += 1


@dataclass
class KeptTracer:
    """``samples`` False: spans propagate the trace and record nothing."""

    samples: bool = True
    spans: list[KeptSpan] = field(default_factory=list)
    _numbers: Any = field(default_factory=lambda: itertools.count(1))

    def start(
        self, name: str, headers: Mapping[str, str], attributes: Mapping[str, Value | None], kind: SpanKind
    ) -> KeptSpan:
        given = headers.get("traceparent")
        trace_id = given.split("-")[1] if given else f"{next(self._numbers):032x}"
        return self.begin(name, kind, trace_id, None, attributes)

    def begin(
        self,
        name: str,
        kind: str,
        trace_id: str,
        parent: KeptSpan | None,
        attributes: Mapping[str, Value | None],
    ) -> KeptSpan:
        known = {key: value for key, value in attributes.items() if value is not None}
        span = KeptSpan(self, name, kind, trace_id, f"{next(self._numbers):016x}", parent, known)
        self.spans.append(span)
        return span

    def close(self) -> None:
        pass

    @property
    def ended(self) -> list[KeptSpan]:
        """Returns the exported spans; asserts that each has ended once."""
        found = [span for span in self.spans if span.num_ends]
        assert all(span.num_ends == 1 for span in found)
        return found

    def only(self, start: str) -> KeptSpan:
        found = [span for span in self.ended if span.name.startswith(start)]
        assert len(found) == 1, [span.name for span in self.ended]
        return found[0]

    def below(self, parent: KeptSpan) -> list[KeptSpan]:
        return [span for span in self.ended if span.parent is parent]
