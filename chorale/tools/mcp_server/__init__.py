"""The built-in tools, offered over MCP."""
