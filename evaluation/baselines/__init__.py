"""Baselines that a user would otherwise run: `generate` of transformers."""
