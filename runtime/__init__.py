"""What every program stands on; it knows nothing of models."""
