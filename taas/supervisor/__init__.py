"""The supervisor: one process for each kernel, with authority over all of the kernel's runs.

The supervisor outlives its kernel for as long as a background run is left.
"""
