"""Compactor: summarizes the history of a choice when it is long, and writes the items."""

from __future__ import annotations

from chorale.harmony.render import ASSISTANT
from chorale.harmony.vocab import START
from chorale.ids import new_id
from chorale.turns.choice.emitter import Emitter
from chorale.turns.choice.item import OpenItem
from chorale.turns.compaction import Compaction
from chorale.turns.events import ItemDelta, ItemOpened, Usage
from chorale.turns.needs import Compact, NextRound

_NEVER = 1 << 62


class Compactor:
    """Decides when a choice is summarized, and writes the items. ``spent``: tokens of all summaries."""

    def __init__(self, plan: Compaction | None, out: Emitter) -> None:
        self.spent = Usage()
        self._plan = plan
        self._out = out
        # Tokens of a prompt above which it is summarized.
        self._threshold = _NEVER if plan is None else plan.threshold

    @property
    def is_due_first(self) -> bool:
        return self._plan is not None and self._plan.first_prompt is not None

    @property
    def ends_turn(self) -> bool:
        return self._plan is not None and self._plan.alone

    def before(self, following: NextRound) -> Compact | None:
        """Returns the summary that is due before a round, or None."""
        plan, prompt = self._plan, following.prompt_token_ids
        if plan is None or len(prompt) < self._threshold:
            return None
        if following.num_new_tokens is None and plan.first_prompt is not None:
            return Compact(list(plan.first_prompt), following)
        return Compact([*prompt[:-2], *plan.ask, START, ASSISTANT], following)

    def stop(self) -> None:
        """Disables summaries, for lack of room."""
        self._threshold = _NEVER

    def progressed(self) -> None:
        """Opens the item; if it is open, emits an empty delta: the summary is being written."""
        if self._out.item is not None:
            self._add("")
            return
        item = OpenItem(self._out.new_index(), "compaction")
        self._out.open(item, ItemOpened(item.index, new_id("cmp"), "compaction"), urgent=True)

    def done(self, packed: str, prompt: list[int], usage: Usage) -> None:
        """Closes the item. ``packed``: its text, which ``prompt`` replaces; ``usage``: the summary's."""
        self.spent.add(usage)
        self._add(packed)
        self._out.close("completed")
        # Prevents repeated summaries of a prompt that does not get shorter.
        assert self._plan is not None
        threshold = self._plan.threshold
        self._threshold = max(threshold, len(prompt) + threshold // 2)

    def _add(self, text: str) -> None:
        assert self._out.item is not None
        self._out.emit(ItemDelta(self._out.item.index, text), urgent=True)
