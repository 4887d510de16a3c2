"""LoRA adapters in the Triton ops: their memory, kernels and ops."""
