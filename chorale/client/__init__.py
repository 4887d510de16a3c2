"""EngineClient: the seam between text and tokens, and its implementations."""
