"""Project files on VMs that do not see the notebook's disk.

``archive``     what of the project travels to a VM, and what was changed there since: packed, and read
``applier``     an archive's changes made to a folder: whole, and over nobody's work
``replica``     how that folder becomes the project on a VM, under the project's own path
"""
