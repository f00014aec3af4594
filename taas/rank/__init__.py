"""The processes that run a cell, one per torch.distributed rank."""
