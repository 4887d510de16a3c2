"""The ``browser`` tool: search, open, find, with numbered lines, cursors and citations."""
