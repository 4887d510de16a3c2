"""One choice of a turn: tokens in, events and what it needs next out. Synchronous, without I/O."""
