"""Both model runners on a GPU."""
