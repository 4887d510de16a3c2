"""/v1/files: files that batches read and write."""

from chorale.api.files.endpoint import routes

__all__ = ["routes"]
