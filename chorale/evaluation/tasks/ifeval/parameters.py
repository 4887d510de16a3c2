"""Parameters of the sentence splitter for English: NLTK's if there are any, else a list of our own.

NLTK's were trained on the Wall Street Journal and are published without a licence, so they are not in this
package. They are read like the questions: from ``punkt_tab.zip`` in ``--data DIR``, from NLTK's own folders,
or from the web. Without them the number of sentences differs from the harness's in a few texts
(docs/evaluation.md).
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from chorale.errors import ConfigError
from chorale.evaluation.data import WebFile, load_file
from chorale.evaluation.tasks.ifeval.punkt import Parameters

SOURCE = WebFile(
    "https://raw.githubusercontent.com/nltk/nltk_data/550b6625bcef1f2abff2ff770a5a0d272c9c6b2a/"
    "packages/tokenizers/punkt_tab.zip",
    "punkt_tab",
    "e57f64187974277726a3417ca6f181ec5403676c717672eef6a748a7b20e0106",
)
_OURS = """
mr mrs ms dr prof rev hon gen col maj capt lt sgt sen rep gov pres jr sr st mt ave blvd rd dept univ inc corp
co ltd bros jan feb mar apr aug sept sep oct nov dec mon tue tues wed thu thurs fri sat sun vs cf fig vol
u.s u.k u.n u.s.a u.s.s.r e.u a.m p.m ph.d m.d b.a m.a d.c n.y l.a b.c a.d
"""
_OUR_STARTERS = """
the a an this that these those it he she they we you i in on at if when while since so but and or however also
there here some many most both although though despite yet then thus therefore moreover finally first second
"""


def built_in() -> Parameters:
    """Returns parameters that need no file."""
    abbreviations = frozenset(_OURS.split()) | frozenset("abcdefghijklmnopqrstuvwxyz")
    return Parameters(abbreviations, frozenset(), frozenset(_OUR_STARTERS.split()), {})


def find_parameters(folder: Path | None) -> Parameters | None:
    """Returns NLTK's parameters, or None if ``folder`` is given and neither it nor NLTK's folders have them.

    Raises ``ConfigError`` if they can be neither found nor downloaded.
    """
    for place in ([folder] if folder is not None else []) + _nltk_folders():
        if (place / "punkt_tab.zip").is_file():
            return read_parameters(place / "punkt_tab.zip")
    return None if folder is not None else read_parameters(load_file(SOURCE))


def _nltk_folders() -> list[Path]:
    named = [Path(name) for name in os.environ.get("NLTK_DATA", "").split(os.pathsep) if name]
    return [place / "tokenizers" for place in (*named, Path.home() / "nltk_data")]


def read_parameters(path: Path) -> Parameters:
    """Returns the English parameters of NLTK's ``punkt_tab.zip``."""
    try:
        with zipfile.ZipFile(path) as archive:
            abbreviations, pairs, starters, contexts = (
                archive.read(f"punkt_tab/english/{name}").decode().rstrip("\n").split("\n")
                for name in ("abbrev_types.txt", "collocations.tab", "sent_starters.txt", "ortho_context.tab")
            )
        split = [line.split("\t") for line in contexts]
        return Parameters(
            frozenset(abbreviations),
            frozenset((first, second) for first, second in (line.split("\t") for line in pairs)),
            frozenset(starters),
            {word: int(bits) for word, bits in split},
        )
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as fault:
        raise ConfigError(f"{path} is not NLTK's punkt_tab.zip: {fault}") from fault
