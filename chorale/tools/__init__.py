"""Built-in tools and MCP as a library. Depends on harmony's messages, not on the HTTP endpoints."""
