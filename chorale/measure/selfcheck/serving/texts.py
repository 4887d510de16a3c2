"""A text of our own making."""

from __future__ import annotations

ENGLISH = (
    "The harbour lay quiet in the morning, and the boats rocked gently on the water. A woman in a blue "
    "coat walked along the wall with a basket of bread, greeting the fishermen as she passed. They had "
    "been out all night and were tired, but the catch was good, and they talked loudly about the price "
    "that they would get for it at the market. Above them, gulls circled and waited for something to "
    "fall. The woman stopped at the last boat, where an old man was mending a net. He looked up and "
    "smiled. He had known her since she was a child, and he always kept a small fish for her cat. In "
    "return she gave him the end of a loaf that was still warm from the oven. They sat for a while and "
    "watched the sun rise over the hills on the other side of the bay. Later in the day, the wind would "
    "turn and bring rain from the west, but for now the sky was clear. "
)
