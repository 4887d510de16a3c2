"""What a step computes on: its batch, the rows' buffers, and captured graphs."""
