"""The reference op set: plain torch, the specification of every op, and what a CPU runs."""
