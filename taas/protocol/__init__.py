"""The messages between processes, their framing, and the keys that protect them.

Every message is a :mod:`msgspec` struct in MessagePack, never a pickle, and is decoded into the
union type that its receiver expects. Objects of the notebook are not part of messages, but are
transferred as :class:`framing.Memory`. Kernel, supervisor and agents communicate over zmq with
CURVE.
"""
