"""The HTTP APIs: each endpoint translates the same stream of OutputEvents. Never imports torch."""
