"""The harmony token format, both directions. Imports only ``chorale.errors``; the only I/O is the vocabulary
file."""
