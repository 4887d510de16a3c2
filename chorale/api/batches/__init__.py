"""/v1/batches: large batches of requests, processed asynchronously."""

from chorale.api.batches.endpoint import routes

__all__ = ["routes"]
