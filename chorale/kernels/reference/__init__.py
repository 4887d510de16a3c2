"""The reference op set in plain torch: the specification of every op, and the CPU back end."""
