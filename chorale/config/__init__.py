"""The operator's choices: frozen values, and the rules that depend on neither model nor machine."""
