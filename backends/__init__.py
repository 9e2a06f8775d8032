"""Executors. Each is registered by name in the entry-point group ``kvtxn.backends``."""
