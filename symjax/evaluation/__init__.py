"""What a checkpoint is worth: losses, λ, samples."""
