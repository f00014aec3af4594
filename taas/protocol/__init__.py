"""The messages that cross process boundaries, their framing, and the keys that protect them.

Every message is a :mod:`msgspec` struct in MessagePack, never a pickle, and is decoded into the one
union that its receiver expects. Values travel beside the messages as :class:`framing.Memory`.
Kernel, supervisor and agents talk over zmq with CURVE.
"""
