"""/v1/files: the input and output files of batches."""

from chorale.api.files.endpoint import routes

__all__ = ["routes"]
