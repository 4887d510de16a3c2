"""Drafts on the device: the state by row, a draft head's passes, and captured steps that verify."""
