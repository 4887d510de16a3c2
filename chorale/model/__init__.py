"""gpt-oss: its configuration, all of its math in one file, and its weights."""
