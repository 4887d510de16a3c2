"""Grammars over harmony frames: the allowed output of a turn, as grammar text, and its compiler.

``constraint`` describes one string (by a schema, a pattern, ...), ``frames`` places constraints within a
turn, ``matcher`` compiles the result with llguidance, and ``checker`` compiles the constraints of requests
early.
"""
