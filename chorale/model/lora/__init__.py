"""LoRA adapters: their configuration, their files, and merging them into a checkpoint."""
