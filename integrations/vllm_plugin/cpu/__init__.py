"""The model runner on the CPU."""
