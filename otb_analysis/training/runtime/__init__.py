"""What a run needs around its formulas: processes, sharded weights, checkpoints, trackers and progress lines."""
