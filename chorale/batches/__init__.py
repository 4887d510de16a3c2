"""Batches: lines of requests, their execution, and their records. No HTTP framework, no torch."""
