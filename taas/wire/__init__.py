"""What crosses a process boundary: structs, their framing, and the keys that guard them.

Everything on a taas wire is a :mod:`msgspec` struct in MessagePack, decoded into the one union that the
receiver expects; nothing here is ever a pickle. Values (the cell's names, rank 0's answer) travel beside the
messages as :class:`Memory`.

Between kernel, supervisor and agents the wire is zmq with CURVE: each peer has a key pair of its own and the
supervisor knows the allowed public keys and the role of each before a peer connects
(https://rfc.zeromq.org/spec/26/, https://rfc.zeromq.org/spec/27/).
"""
