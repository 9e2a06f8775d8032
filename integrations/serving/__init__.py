"""Parts of any engine's steps: windows and the ledger; and engines in processes of their own."""
