"""Completions: raw prompts (text or token ids) to raw text, without harmony parsing."""
