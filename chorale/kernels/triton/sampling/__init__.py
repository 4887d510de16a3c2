"""Sampling, and the inputs of decode steps."""
