"""Rows of our own making in the columns of the published data sets, for tests and for ``--data sample``."""
