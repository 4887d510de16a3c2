"""CompactingRounds: the part of a choice that knows when its conversation is summed up, and what follows."""

from __future__ import annotations

from chorale.ids import new_id
from chorale.turns.events import ItemClosed, ItemDelta, ItemOpened, Usage
from chorale.turns.item import OpenItem
from chorale.turns.options import Round
from chorale.turns.tools.rounds import ToolRounds


class CompactingRounds(ToolRounds):
    """Base of ``Choice``. A compaction is an item: ``begin_compaction``, at last ``end_compaction``."""

    spent: Usage
    _grammar_start: int
    _compact_at: int  # tokens of a prompt before which the conversation is summed up

    def _await_compaction(self) -> None:
        """Before anything else of the choice, where the request's own prompt is due."""
        compaction = self._options.compaction
        if compaction is None:
            return
        self._compact_at = compaction.threshold
        if compaction.first_prompt is not None and self.tool_call is None:
            self.next_round = Round(self._prompt, ())

    def compaction_due(self, following: Round) -> bool:
        """Whether a summary comes before that round. Never within a message that was begun for the model."""
        if self._options.compaction is None or following.prefill_token_ids:
            return False
        return len(following.prompt_token_ids) >= self._compact_at

    def skip_compaction(self) -> None:
        """There is no room for a summary: none is tried again."""
        self._compact_at = 1 << 62

    def begin_compaction(self) -> None:
        self._item = OpenItem(self._new_index(), "compaction")
        self._urgent = True
        self._pending.append(ItemOpened(self._item.index, new_id("cmp"), "compaction"))

    def on_summary_begun(self) -> None:
        """An empty delta says that the summary is being written."""
        assert self._item is not None
        self._urgent = True
        self._pending.append(ItemDelta(self._item.index, ""))

    def end_compaction(self, following: Round, packed: str, prompt: list[int], usage: Usage) -> None:
        """``following``: the round that waited; it begins with ``prompt`` now. ``usage``: the summary's."""
        compaction, item = self._options.compaction, self._item
        assert compaction is not None
        assert item is not None
        self.spent.add(usage)
        self._item = None
        self._urgent = True
        self._pending += [ItemDelta(item.index, packed), ItemClosed(item.index)]
        if compaction.alone:
            self.usage.input_tokens = 0  # nothing but the summary was generated
            self.end("stop")
            return
        # What cannot be made shorter is not summed up again and again.
        self._compact_at = max(compaction.threshold, len(prompt) + compaction.threshold // 2)
        if following.num_new_tokens is None:
            self._prompt = prompt
            self._grammar_start = self.usage.input_tokens = len(prompt)
            self.next_round = Round(prompt, ())
        else:
            self.next_round = Round(prompt, (), num_new_tokens=len(prompt))
