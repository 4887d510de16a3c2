"""HTTP plumbing: the server, its limits, authentication, bodies, streams and WebSockets."""
