"""Shared by the harmony tests: our vocabulary, and openai-harmony as the oracle (tests only)."""

from __future__ import annotations

from collections.abc import Iterator

import openai_harmony
import pytest

from chorale.harmony.vocab import RANKS_DIR_VARIABLE, Vocabulary, export_vocabulary, load_vocabulary


@pytest.fixture(scope="session")
def vocab() -> Vocabulary:
    return load_vocabulary()


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai_harmony.HarmonyEncoding]:
    """openai-harmony, reading the vocabulary that we export (it cannot download one here)."""
    folder = tmp_path_factory.mktemp("ranks")
    export_vocabulary(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RANKS_DIR_VARIABLE, str(folder))
        yield openai_harmony.load_harmony_encoding("HarmonyGptOss")
