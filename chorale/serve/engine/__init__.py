"""The processes on the device: the engine process and its ranks, and how an engine is built."""
