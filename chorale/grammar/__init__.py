"""Grammars over harmony frames: what a turn may look like, as text, and the matcher that follows it.

``constraint`` says what one text must be (a schema, a pattern, ...), ``frames`` puts constraints where they
belong in a turn, ``matcher`` compiles the result with llguidance, the only module that imports it.
"""
