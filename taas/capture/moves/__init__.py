"""Transfer of variables from the notebook to the ranks, to kept ranks, and back."""
