"""``kvtxn bench soak``: an engine with windows under mixed requests for a long time, in pieces."""
