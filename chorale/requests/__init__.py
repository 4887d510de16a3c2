"""OpenAI's JSON, both ways: messages, tools, formats and usage as values of a turn."""
