"""vLLM's classes as kvtxn reads them: a protocol for each. It imports nothing of kvtxn's."""
