"""The reference op set in plain torch: the specification of every op."""
