"""Adapters that stand in vLLM's own calls and tell the parts what vLLM does."""
