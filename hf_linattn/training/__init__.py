"""The training loop, its options, folder, checkpoints, optimizers and objectives."""
