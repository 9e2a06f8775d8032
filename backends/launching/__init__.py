"""Launching kernels, and launching them again in as little of the host's time as can be.

- ``kernel_call``: a launch with all of its arguments.
- ``repeated_launch``: the same again by CUDA's driver, its arguments packed once.

Outside of this package nothing in the backends uses ``ctypes``.
"""
