"""From logits to tokens: parameters, processors, grammars and log-probabilities of rows."""
