"""What outlives a request: responses, conversations, stored completions; in SQLite or PostgreSQL."""
