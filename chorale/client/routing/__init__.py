"""Which engine takes a request."""
