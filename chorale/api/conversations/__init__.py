"""/v1/conversations: conversations and their items, which responses can continue."""
