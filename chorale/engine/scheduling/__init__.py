"""What a step computes, and what its result changes."""
