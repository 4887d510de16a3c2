"""``--speculative-config`` and the flags that set one key of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from chorale.config.options.settings import Settings, merge
from chorale.config.options.speculation import check_served
from chorale.config.speculative import SpeculativeConfig
from chorale.errors import ConfigError

JSON = '{"method": "ngram", "num_speculative_tokens": 4}'


def speculative(*arguments: str, environment: dict[str, str] | None = None) -> SpeculativeConfig | None:
    return merge(arguments, environment or {}).engine.speculative_config


def test_flags_json_and_file_give_the_same_config(tmp_path: Path) -> None:
    expected = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    path = tmp_path / "c.yaml"
    path.write_text("speculative-config:\n  method: ngram\n  num_speculative_tokens: 4\n")
    assert speculative() is None
    assert speculative("-sc", "null") is None
    assert speculative("--speculative-config", JSON) == expected
    assert speculative("-sc.method", "ngram", "-sc.num_speculative_tokens=4") == expected
    assert speculative("--spec-method", "ngram", "--spec-tokens", "4") == expected
    assert speculative("--speculative-model", "[ngram]", "--num-speculative-tokens", "4") == expected
    assert speculative("--config", str(path)) == expected
    assert speculative(environment={"CHORALE_SPECULATIVE_CONFIG": JSON}) == expected
    more = speculative("--config", str(path), "--spec-tokens", "6")  # the command line wins
    assert more is not None
    assert (more.method, more.num_speculative_tokens) == ("ngram", 6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-sc", JSON, "--spec-tokens", "5"), "contradict each other"),
        (("--spec-tokens", "5"), "method is missing"),
        (("--spec-tokens", "40"), "between 1 and 16"),
        (("-sc", "ngram"), "is not JSON"),
        (("-sc", '"ngram"'), "JSON object"),
        (("-sc.method", "ngram", "-sc.prompt_lookup_mux", "3"), "did you mean prompt_lookup_max"),
        (("-tp", "4", "--spec-model", "x/eagle3", "-sc.draft_tensor_parallel_size", "2"), "whole head"),
    ],
)
def test_errors_name_the_problem(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        speculative(*arguments)


def test_synthetic_acceptance_is_not_served_unless_allowed() -> None:
    def settings(*more: str) -> Settings:
        profile = '{"method": "synthetic", "acceptance": [0.8, 0.5]}'
        return merge(["--speculative-config", profile, *more], {})

    refused, allowed = settings(), settings("--allow-synthetic-acceptance")
    with pytest.raises(ConfigError, match="is meaningless"):
        check_served(refused.engine, refused.values)
    check_served(allowed.engine, allowed.values)
    plain = merge(["-sc", JSON], {})
    check_served(plain.engine, plain.values)


def test_a_key_without_effect_is_a_notice() -> None:
    notices = merge(["-sc", JSON, "-sc.quantization", "fp8"], {}).notices
    assert len(notices) == 1
    assert "quantization in --speculative-config is accepted and has no effect" in notices[0]
