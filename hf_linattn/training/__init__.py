"""The training loop, its checkpoints, optimizers and objectives."""
