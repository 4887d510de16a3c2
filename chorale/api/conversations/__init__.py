"""/v1/conversations: conversations and their items, to be continued by responses."""

from chorale.api.conversations.endpoint import routes

__all__ = ["routes"]
