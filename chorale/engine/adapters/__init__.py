"""Slots of LoRA adapters on the device."""
