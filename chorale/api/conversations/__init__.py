"""/v1/conversations: conversations and their items, which responses can continue."""

from chorale.api.conversations.endpoint import routes

__all__ = ["routes"]
