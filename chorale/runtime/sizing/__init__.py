"""From options that were left open to numbers, each with its reason. Needs no torch."""
