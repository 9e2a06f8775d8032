"""``kvtxn audit`` and ``kvtxn trace``: an engine under the ledger, its verdict, and its page."""
