"""Chooses values for options that the operator did not set, each with its reason. Needs no torch."""
