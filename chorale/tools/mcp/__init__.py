"""The Model Context Protocol: a bounded client of foreign servers, and our own tools as servers."""
