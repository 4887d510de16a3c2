"""Train, pack and measure the demo checkpoint's EAGLE3 head."""
