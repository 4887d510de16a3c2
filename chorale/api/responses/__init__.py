"""/v1/responses: request, conversation, events, store."""
