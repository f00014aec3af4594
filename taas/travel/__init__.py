"""Project files on VMs that do not see the notebook's disk.

``same_disk``   whether a VM sees it: found out, not assumed
``parcel``      what of the project travels to a VM, packed and unpacked
``replica``     how that folder becomes the project there, under the project's own path
``watcher``     what changed beneath a folder of the VM, as it becomes complete
``applier``     these changes made to the notebook's project: whole, durable, and over nobody's work
``changes``     what crosses between the two; who carries it is no affair of theirs
``tree``        how a file is known again; ``own_files`` names for files that are taas' own
"""
