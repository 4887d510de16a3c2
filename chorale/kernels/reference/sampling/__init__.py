"""Sampling, and the inputs of decode and draft steps, in plain torch."""
