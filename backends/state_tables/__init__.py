"""Tables of state blocks: the blocks that keep a state, at a commit and at the ends of blocks."""
