"""Built-in tools within a turn: checks of availability, opening, calls."""
