"""The processes of a running server: the engine process, and the supervisor above it."""
