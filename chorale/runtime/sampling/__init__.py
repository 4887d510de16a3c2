"""From logits to tokens: parameters, edits, grammars and log-probabilities of rows."""
