"""Storage of responses, conversations and chat completions, in SQLite or PostgreSQL."""
