"""Counters of all workers, for a program and for Prometheus."""
