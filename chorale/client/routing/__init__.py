"""Data for choosing the engine that takes a request."""
