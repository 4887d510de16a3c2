"""Built-in tools and MCP, as a library: knows harmony's recipients, nothing of the HTTP endpoints."""
