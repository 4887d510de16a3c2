"""The harmony token format, both directions, as pure functions. No I/O and no other part of Chorale."""
