"""The ledger's part of an engine: it hears each step and logs wrong reads."""
