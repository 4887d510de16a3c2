"""This machine: GPUs, memory, links, processes, signals and temporary folders. Needs no torch."""
