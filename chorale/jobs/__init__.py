"""Work that a server process leases from the store and another may take over."""
