"""Project files on VMs that do not see the notebook's disk.

``archive``     what of the project travels to a VM, packed and unpacked
``replica``     how that folder becomes the project there, under the project's own path
``watcher``     what changed beneath a folder of the VM, as it becomes complete
``applier``     these changes made to the notebook's project: whole, durable, and over nobody's work
``tree``        what stands at a path, how it is known again, and the changes that cross, whoever carries them; taas' own
                files there, one of which tells whether a VM sees this disk
"""
