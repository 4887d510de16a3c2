"""Drafts on the device: state per row, the draft head's passes, and captured steps that verify drafts."""
