"""Time and bytes of single kernels on a GPU."""
