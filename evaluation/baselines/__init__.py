"""What a user would run instead: `generate` of transformers, the plain harvest, models in turn."""
