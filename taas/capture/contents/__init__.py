"""What is inside an object, one level deep: taken, compared, and put back into the object it came from.

Rank 0 takes the contents of every object that travelled before the cell runs, and again afterwards. They
are compared by identity, so no ``__eq__`` of the user's runs. What differs is sent, and put in place into
the notebook's object. Each *kind* of object knows how: containers, instances (also with ``__slots__``),
functions, cells, tensors; and, for whatever has a pickling protocol of its own, its reduced state.
"""
