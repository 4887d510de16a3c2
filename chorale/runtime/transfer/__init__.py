"""Weight transfer: how new weights reach a rank while the engine is paused."""
