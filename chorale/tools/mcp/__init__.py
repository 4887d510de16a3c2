"""The Model Context Protocol: a client for untrusted servers, and servers of the built-in tools."""
