"""Paged attention with sinks and a window."""
