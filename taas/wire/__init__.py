"""What crosses a process boundary: structs, their framing, and the keys that guard them.

Everything on a taas wire is a :mod:`msgspec` struct in MessagePack, decoded into the one union that
the receiver expects; nothing here is ever a pickle. Values travel beside the messages as
:class:`framing.Memory`. Between kernel, supervisor and agents the wire is zmq with CURVE.
"""
