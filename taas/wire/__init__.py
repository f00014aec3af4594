"""What crosses a process boundary: messages, their framing, and the keys that protect them.

Every message is a :mod:`msgspec` struct in MessagePack, and is decoded into the one union that its
receiver expects; none is ever a pickle. Values travel beside the messages as
:class:`framing.Memory`. Kernel, supervisor and agents talk over zmq with CURVE.
"""
