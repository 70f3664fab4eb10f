"""Training runs: from a configuration to a trained model."""
