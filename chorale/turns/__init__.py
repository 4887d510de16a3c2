"""Turns of a conversation: prompt tokens in, output events out. Independent of HTTP, pydantic and SQL."""
