"""What ledgers are tested with: a small engine, a dict model of the ledger, and faulty engines."""
