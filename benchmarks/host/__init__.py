"""Time that windows take on the host."""
