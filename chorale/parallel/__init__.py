"""Several processes that run one model: what each rank owns, how ranks exchange tensors, their executor."""
