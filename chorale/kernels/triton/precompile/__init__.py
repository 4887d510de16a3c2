"""Compiles kernels before they are launched, in processes beside the engine."""
