"""The ledger of any engine: what it is told of each step, what it finds, what becomes of that."""
