"""Discovery at start-up of the kernels that an engine will launch."""
