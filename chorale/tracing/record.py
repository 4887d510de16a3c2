"""RequestRecord: the work of engines for one request, over all its rounds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Round:
    """One generation of an engine. Seconds; None: unknown."""

    num_input: int
    num_cached: int = 0
    num_output: int = 0
    num_choices: int = 1
    seconds_to_first_token: float | None = None
    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None

    @property
    def inference(self) -> float | None:
        return None if self.prefill is None or self.decode is None else self.prefill + self.decode

    def attributes(self) -> dict[str, float | int | None]:
        """Returns the usage under the names of OpenTelemetry's conventions for generative AI and under
        vLLM's, and vLLM's latencies."""
        return {
            "gen_ai.usage.input_tokens": self.num_input,
            "gen_ai.usage.output_tokens": self.num_output,
            "gen_ai.usage.cache_read.input_tokens": self.num_cached,
            "gen_ai.usage.prompt_tokens": self.num_input,
            "gen_ai.usage.completion_tokens": self.num_output,
            "gen_ai.latency.time_in_queue": self.queue,
            "gen_ai.latency.time_to_first_token": self.seconds_to_first_token,
            "gen_ai.latency.time_in_model_prefill": self.prefill,
            "gen_ai.latency.time_in_model_decode": self.decode,
            "gen_ai.latency.time_in_model_inference": self.inference,
        }


@dataclass(slots=True)
class RequestRecord:
    """Written by the spans of its rounds (``api/telemetry/generation_span.py``) and the ends of its choices.

    ``arrival``: ``time.time()`` of the first round's request.
    """

    model: str | None = None  # name in the request
    response_id: str = ""
    arrival: float = 0.0
    sampling: dict[str, float | int | None] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    error: str | None = None  # code of the error that ended a choice

    def total(self) -> Round:
        """Returns the sums; time in the queue and to the first token are those of the first round."""
        total = Round(0, num_choices=0)
        for each in self.rounds:
            total.num_input += each.num_input
            total.num_cached += each.num_cached
            total.num_output += each.num_output
            total.num_choices = max(total.num_choices, each.num_choices)
            if each.prefill is not None and each.decode is not None:
                total.prefill = (total.prefill or 0.0) + each.prefill
                total.decode = (total.decode or 0.0) + each.decode
        if self.rounds:
            total.queue = self.rounds[0].queue
            total.seconds_to_first_token = self.rounds[0].seconds_to_first_token
        return total

    def attributes(self, now: float) -> dict[str, str | float | int | tuple[str, ...] | None]:
        """Returns the attributes of the request's span. Empty if it never reached an engine."""
        if not self.rounds:
            return {}
        total = self.total()
        return {
            "gen_ai.response.id": self.response_id or None,
            "gen_ai.response.finish_reasons": tuple(self.finish_reasons) or None,
            "gen_ai.usage.num_sequences": total.num_choices,
            "gen_ai.latency.e2e": now - self.arrival if self.arrival else None,
            **self.sampling,
            **total.attributes(),
        }
