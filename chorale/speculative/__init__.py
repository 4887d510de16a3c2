"""Speculation: how tokens are drafted, as the operator configures it."""
