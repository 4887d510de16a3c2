"""Commands about the files of models."""
