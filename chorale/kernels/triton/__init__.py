"""The Triton op set: fused kernels for CUDA (and, unverified, ROCm). ``ops.TRITON_OPS`` is its record.

Importing this package imports no Triton; importing its modules does. ``docs/lab/kernels.md`` has predictions
and measurements of each kernel.
"""
