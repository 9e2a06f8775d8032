"""States of recurrent layers advanced in Triton: one launch for all layers of a window."""
