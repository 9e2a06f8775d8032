"""Launching kernels, and launching them again in as little of the host's time as can be.

- ``packed_launch``: a compiled Triton kernel by CUDA's driver, its arguments packed once.
- ``kernel_call``: a launch with all of its arguments; ``RepeatedLaunch`` makes it again.
- ``launch_cache``: prepared launches by key, bounded in bytes.
- ``graph_launch``: a captured CUDA graph by CUDA's driver.
- ``recurring_graphs``: captures what recurs, and keeps it in the executor's ``GraphCache``.
- ``host_memory``: memory of the host as numbers that Python may write.

Outside of this package nothing in the backends uses ``ctypes``.
"""
