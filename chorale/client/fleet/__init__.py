"""Several engines behind one client."""
