"""/v1/files: the input and output files of batches."""
