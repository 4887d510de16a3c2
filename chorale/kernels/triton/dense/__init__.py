"""Norms and dense products: QKV, output projection, head."""
