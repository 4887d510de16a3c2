"""Benchmarks and the self-check."""
