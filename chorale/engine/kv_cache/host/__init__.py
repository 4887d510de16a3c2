"""The tier of host memory: which pages it holds, and the loads that bring them back."""
