"""Chat Completions: request model, conversion of messages to harmony, chunks and body."""
