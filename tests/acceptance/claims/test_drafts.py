"""The drafts of an answer are in its metrics.

``runtime/test_draft_properties.py`` and ``runtime/drafts`` test that drafts change no token, and
``test_streams.py`` that answers do not depend on how many tokens a step has.
"""

from __future__ import annotations

from chorale.config.engine import EngineConfig
from chorale.config.speculative import SpeculativeConfig
from chorale.serve.engine.build import build_engine
from tests.support.local_client import LocalClient
from tests.support.server import served


async def test_the_drafts_of_one_answer_add_up_to_those_of_the_engine() -> None:
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    config = EngineConfig(model="demo", max_model_len=1024, num_threads=1, speculative_config=speculation)
    client = LocalClient(*build_engine(config))
    async with served(client, names=("demo",), spec_decode_metrics="detailed") as server:
        answer = await server.complete("one two one two one two", temperature=0, max_tokens=60)
        [choice], metrics = answer.json()["choices"], answer.json()["metrics"]
        assert choice["prompt_logprobs"] is choice["token_ids"] is None
        found, stats = metrics["speculative_decoding"], client.stats
        assert found["num_spec_steps"] == stats.num_drafts > 0
        assert sum(found["per_step_drafted"]) == found["num_draft_tokens"] == stats.num_draft_tokens
        assert sum(found["per_step_accepted"]) == stats.num_accepted_tokens
        several = await server.complete("one two", n=2, max_tokens=5)
        assert "metrics" not in several.json()
