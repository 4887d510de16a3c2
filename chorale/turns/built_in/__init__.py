"""Built-in tools within a turn: available, opened, called."""
