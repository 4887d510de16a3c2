"""A stateful API of our own making, in the form of the leaderboard's API classes."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

_START: dict[str, Any] = {"items": {}, "shopping": [], "open": False}


class PantryAPI:
    """A pantry with a door, items and a shopping list."""

    def __init__(self) -> None:
        self.items: dict[str, int] = {}
        self.shopping: list[str] = []
        self.open = False
        self._long_context = False

    def _load_scenario(self, scenario: dict[str, Any], long_context: bool = False) -> None:
        whole = deepcopy(_START) | scenario
        self.items, self.shopping, self.open = whole["items"], whole["shopping"], whole["open"]
        self._long_context = long_context
        if long_context:
            self.items |= {f"jar {number}": number for number in range(1, 301)}

    def open_door(self) -> dict[str, Any]:
        """Opens the door."""
        self.open = True
        return {"open": self.open}

    def close_door(self) -> dict[str, Any]:
        """Closes the door."""
        self.open = False
        return {"open": self.open}

    def add_item(self, name: str, quantity: int = 1) -> dict[str, Any]:
        """Puts items on the shelf. The door must be open."""
        if not self.open:
            return {"error": "The door is closed."}
        self.items[name] = self.items.get(name, 0) + quantity
        return {"name": name, "quantity": self.items[name]}

    def take_item(self, name: str, quantity: int = 1) -> dict[str, Any]:
        """Takes items from the shelf. The door must be open."""
        if not self.open:
            return {"error": "The door is closed."}
        if self.items.get(name, 0) < quantity:
            raise ValueError(f"There is not enough {name}.")
        self.items[name] -= quantity
        return {"name": name, "quantity": self.items[name]}

    def count_item(self, name: str) -> dict[str, Any]:
        """Counts an item."""
        return {"name": name, "quantity": self.items.get(name, 0)}

    def list_items(self) -> dict[str, Any]:
        """Lists all items."""
        return {"items": self.items}

    def note(self, text: str) -> str:
        """Adds a line to the shopping list."""
        self.shopping.append(text)
        return f"noted: {text}"
