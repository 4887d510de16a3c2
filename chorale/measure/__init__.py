"""Measuring: benchmarks and the self-check."""
