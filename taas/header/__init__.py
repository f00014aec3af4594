"""Parse the ``#pragma taas`` comment of a cell (the *header*) into a `RunSpec`."""
