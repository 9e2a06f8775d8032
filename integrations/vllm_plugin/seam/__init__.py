"""Where the plug-in stands in vLLM's own calls: adapters that tell the parts what vLLM does."""
