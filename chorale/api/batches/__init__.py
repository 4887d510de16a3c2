"""/v1/batches: files of requests that are answered in the background."""

from chorale.api.batches.endpoint import routes

__all__ = ["routes"]
