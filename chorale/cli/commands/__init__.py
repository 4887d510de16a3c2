"""One module per command, except ``bench``."""
