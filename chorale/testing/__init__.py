"""Test doubles that ship with the package: an executor without a model, and a client with scripted tokens."""
