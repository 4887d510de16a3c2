"""The ``python`` tool: a persistent interpreter in a sandbox, one per chain of responses."""
