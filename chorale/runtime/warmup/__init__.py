"""Which kernels a start needs, found by a dry run of every kind of step."""
