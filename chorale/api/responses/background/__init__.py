"""Background responses: jobs, streams from stored events, and recovery after a crash."""
