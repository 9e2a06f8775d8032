"""Parts that every benchmark shares: the gate, the machine, statistics, tables."""
