"""Going out: which addresses may be reached, and fetches that are bounded in time and size."""
