"""Pages of the KV cache in host memory: the memory itself, and the copies to and from it."""
