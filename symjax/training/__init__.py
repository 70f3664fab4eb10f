"""From a configuration to a trained model: optimizer, sharding, step, checkpoints."""
