"""The default model that ships with the package."""
