"""The processes that run a cell: one torch.distributed rank each."""
