"""What the operator asked for: frozen values, and the rules that need neither model nor machine."""
