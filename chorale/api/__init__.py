"""HTTP: one stream of OutputEvents, one translator per endpoint. Never imports torch."""
