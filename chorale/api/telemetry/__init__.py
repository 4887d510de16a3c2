"""Metrics, periodic log lines and spans of the HTTP process."""
