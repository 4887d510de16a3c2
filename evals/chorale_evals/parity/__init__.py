"""Parity: whether two servers, or one before and after a change, compute the same model."""
