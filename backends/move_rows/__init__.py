"""Moving rows: one launch commits, saves or restores rows in all layers."""
