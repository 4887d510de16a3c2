"""The harmony token format, both directions, as pure functions. No I/O, nothing of ours imported."""
