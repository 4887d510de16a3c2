"""Messages and sockets between HTTP and engine processes."""
