"""Start-up: finds the kernels that an engine will launch, and captures graphs."""
