"""The ``python`` tool: a persistent interpreter in a sandbox, one for a chain of responses."""
