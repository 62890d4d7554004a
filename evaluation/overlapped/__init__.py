"""Engines that run both models side by side, counted and priced from recorded rollouts."""
