"""/v1/batches: large batches of requests, processed asynchronously."""
