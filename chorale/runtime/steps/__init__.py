"""The inputs of a step: its batch, the rows' buffers, and captured graphs."""
