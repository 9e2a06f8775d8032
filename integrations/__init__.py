"""kvtxn inside inference engines."""
