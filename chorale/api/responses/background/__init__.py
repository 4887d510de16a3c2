"""Background responses: their jobs, the log of their events, and what follows a crash."""
