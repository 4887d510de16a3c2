"""The HTTP side of a server: the listening server, its drain, and the app that it serves."""
