"""The audit inside vLLM: a ledger of ``kvtxn.audit`` follows every step of the engine."""
