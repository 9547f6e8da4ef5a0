"""Training: config, data, features, the one accelerate loop, checkpoints."""
