"""The command line: the composition root that reads arguments and environment."""
