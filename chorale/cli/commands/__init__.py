"""One module for each command but ``bench``."""
