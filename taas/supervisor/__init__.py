"""The supervisor: one process for each kernel, with authority over its runs.

It outlives the kernel while a background run is left.
"""
