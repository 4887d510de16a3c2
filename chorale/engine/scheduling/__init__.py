"""Planning of steps, and commits of their results."""
