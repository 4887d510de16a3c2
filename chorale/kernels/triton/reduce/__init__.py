"""The all-reduce over the GPUs of one host, with residual, norm and router in its kernels."""
