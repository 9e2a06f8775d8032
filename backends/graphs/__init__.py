"""CUDA graphs: windows at fixed addresses, and commits that are replayed."""
