"""Draft heads (EAGLE3): a head's configuration, its files, its weights and its math."""
