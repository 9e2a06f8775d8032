"""Decisions: the policy of an engine, and the reason."""
