"""/v1/responses: request, conversation, events, store."""

from chorale.api.responses.endpoint import routes

__all__ = ["routes"]
