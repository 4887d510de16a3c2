"""From logits to tokens, and the inputs of a decode step."""
