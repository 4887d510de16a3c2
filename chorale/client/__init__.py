"""EngineClient: the interface between text code and the engine, and its implementations."""
