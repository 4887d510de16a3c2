"""Grammars over harmony frames: the allowed forms of a turn, as text, and the matcher that follows it.

``constraint`` describes one text (a schema, a pattern, ...), ``frames`` places constraints within a turn,
``matcher`` compiles the result with llguidance, the only module that imports it.
"""
