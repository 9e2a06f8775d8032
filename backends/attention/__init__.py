"""Attention that reads a window's rows beside the cache."""
