"""Measurements: ``kvtxn bench``. Results are JSON in ``results/``; tables are made from them."""
