"""Counts the hand-written requests that also occur as messages of the training corpus.

    python -m training.overlap --conversations 20000

Draws this many training conversations of each family, and compares every message of their users with every
request of ``training/prompts``, ignoring case, signs at both ends and repeated spaces ("?" and "..." are
equal, since both become empty). Lists each request that occurs, with its families. The corpus is random, so a
larger count may find more.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from training.corpus import MIXTURE, Family, sample
from training.handwritten import FILES, load

_SIGNS = " .,:;!?¿¡'\"()[]-–…"


def plain(text: str) -> str:
    return " ".join(text.lower().split()).strip(_SIGNS)


def said(family: Family, conversations: int) -> Iterator[str]:
    """Returns the messages of users in a family's training conversations, normalised."""
    for seed in range(conversations):
        for message in sample(seed, "train", family).history:
            if message.role == "user" and isinstance(message.content, str):
                yield plain(message.content)


def overlap(texts: Iterable[str], conversations: int) -> dict[str, list[str]]:
    """Returns those of ``texts`` that occur in training, normalised -> their families."""
    asked = {plain(text) for text in texts}
    found: dict[str, list[str]] = {}
    for family in MIXTURE:
        for text in asked & set(said(family, conversations)):
            found.setdefault(text, []).append(f"{family.__module__.rpartition('.')[2]}.{family.__name__}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--conversations", type=int, default=20_000, help="of each family")
    options = parser.parse_args()
    requests = {name: load([name]) for name in FILES}
    found = overlap(
        (one["ask"] for kinds in requests.values() for asked in kinds.values() for one in asked),
        options.conversations,
    )
    for name, kinds in requests.items():
        equal = [
            (kind, one["ask"]) for kind, asked in kinds.items() for one in asked if plain(one["ask"]) in found
        ]
        print(f"{name}: {len(equal)} of {sum(map(len, kinds.values()))} are said in training")
        for kind, text in equal:
            print(f"- {kind}: {text!r}: {', '.join(found[plain(text)])}")


if __name__ == "__main__":
    main()
