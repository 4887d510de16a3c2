"""Norms, products, rotary embedding and the draft head's inputs in plain torch."""
