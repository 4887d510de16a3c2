"""Publishes additions to and removals from the prefix index."""
