"""Checks of a running server, over HTTP. Torch-free."""
