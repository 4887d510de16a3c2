"""Benchmarks: load on any OpenAI server (``serve``), the engine without HTTP (``latency``, ``throughput``),
start-up, kernels, and random checkpoints of the published sizes to run them on.

Nothing here is imported by the engine or the server.
"""
