"""One turn of a conversation: prompt tokens in, output events out. Knows no HTTP, no pydantic and no SQL."""
