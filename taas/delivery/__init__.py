"""Delivery of registered DataLoaders: planned in order, made anywhere, yielded exactly once.

::

    planner ──Planned──► coordinator ──Tickets──► data workers (on M data VMs)
    (user's sampler)      (ledger)  ◄──Results──   │ elements
                             ▲                     ▼
                             └──────Progress───── ranks

The arrows are structs of ``messages``. One coordinator per run owns the plan's ledger and the
shared slabs, and unpickles nothing. The user's sampler runs in a planner process of its own, the
user's dataset in data workers forked from one process per data VM. Elements go from worker to rank
directly: through a slab of shared memory on one host, as zmq frames between hosts.
``docs/delivery.md`` has the guarantees in words.
"""
