"""Harvesting: prompts, target responses, draft rollouts, labels and shards."""
