"""The command line: the composition root, where arguments and environment variables are read."""
