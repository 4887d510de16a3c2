"""Built-in tools and MCP as a library. Depends on harmony's recipients, not on the HTTP endpoints."""
