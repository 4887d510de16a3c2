"""One choice of a turn: tokens in, events and the next need out. Synchronous, without I/O."""
