"""Tables of state blocks, and kernels that an engine with recurrent states runs beside them."""
