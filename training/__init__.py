"""How the demo checkpoint was made: corpus generator, trainer, evaluation. Not shipped in the wheel."""
