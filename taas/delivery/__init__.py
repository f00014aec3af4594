"""Delivery of registered DataLoaders: planned in order, made on any worker, yielded exactly once.

::

    planner ──Planned──► coordinator ──Tickets──► data workers (on M data VMs)
    (user's sampler)      (ledger)  ◄──Results──   │ batches
                             ▲                     ▼
                             └──────Progress───── ranks

A *batch* here is one item that a loader yields, even if the loader does not batch; identifiers and
messages call it an element. A *data VM* is a machine whose CPUs run data workers. The arrows are
structs of ``taas.protocol.delivery_messages``.

One coordinator per run owns the plan's ledger and the shared slabs, and unpickles nothing. The
user's sampler runs in a separate planner process, and the user's dataset in data workers that are
forked from one process per data VM. Batches go directly from worker to rank: through a slab of
shared memory on one host, as zmq frames between hosts. ``docs/delivery.md`` explains the
guarantees.
"""
