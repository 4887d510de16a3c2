"""Op back ends: the plain-torch reference (specification, oracle, CPU) and the Triton kernels."""
