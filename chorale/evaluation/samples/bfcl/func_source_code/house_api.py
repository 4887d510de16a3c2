"""A stateful API of our own making, with functions that the demo model knows."""

from __future__ import annotations

from typing import Any


class HouseAPI:
    """A timer, lights, and a thermometer outside."""

    def __init__(self) -> None:
        self.timers: list[int] = []
        self.lights: dict[str, bool] = {}

    def _load_scenario(self, scenario: dict[str, Any], long_context: bool = False) -> None:
        self.timers = scenario.get("timers", [])
        self.lights = scenario.get("lights", {})

    def set_timer(self, minutes: int) -> dict[str, Any]:
        """Starts a timer."""
        self.timers.append(minutes)
        return {"timers": self.timers}

    def set_light(self, room: str, on: bool) -> dict[str, Any]:
        """Switches the light of a room."""
        self.lights[room] = on
        return {"lights": self.lights}

    def get_weather(self, city: str) -> str:
        """Returns the weather."""
        return f"{len(city) + 5} degrees"
