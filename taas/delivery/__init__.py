"""Delivery of registered DataLoaders: planned in order, made on any worker, yielded exactly once.

::

    planner ──Planned──► coordinator ──Tickets──► data workers (on M data VMs)
    (user's sampler)      (ledger)  ◄──Results──   │ elements
                             ▲                     ▼
                             └──────Progress───── ranks

An *element* is one item that a loader yields, usually a batch; most texts here call it a batch.
The arrows are structs of ``protocol.delivery_messages``. One coordinator per run owns the plan's
ledger and the shared slabs, and unpickles nothing. The user's sampler runs in a separate planner
process, the user's dataset in data workers forked from one process per data VM (a machine whose
CPUs load data). Batches go directly from worker to rank: through a slab of shared memory on one
host, as zmq frames between hosts. ``docs/delivery.md`` explains the guarantees.
"""
