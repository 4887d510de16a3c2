"""Finding out at start-up which kernels an engine will launch."""
