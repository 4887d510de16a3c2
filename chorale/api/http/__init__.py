"""The HTTP layer: limits, authentication, bodies, streams and WebSockets."""
