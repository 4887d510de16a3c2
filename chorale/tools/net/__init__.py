"""Outgoing requests: allowed addresses, and fetches with limits on time and size."""
