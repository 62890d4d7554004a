"""How a predictor is fitted: trainer, batches, losses, resampling, resuming."""
