"""Drafts: guesses of a row's next tokens, which a step verifies all at once."""
