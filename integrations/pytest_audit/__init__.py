"""``pytest --kvtxn-audit``: every vLLM engine that a test starts is audited."""
