"""Whole vLLM engines, kvtxn and stock in one run."""
