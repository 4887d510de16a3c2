"""The parts of ``chorale eval``: options, progress, tables."""
