"""Owns the device: executor, worker, buffers, sampler, memory."""
