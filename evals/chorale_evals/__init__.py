"""Evaluation: tasks with known answers, run against a server over HTTP, with a journal and a report."""
