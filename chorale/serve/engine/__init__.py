"""The processes that use the device: the engine process and its rank processes."""
