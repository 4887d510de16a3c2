"""Tests of the harmony room."""
