"""The embedded pairs: their weights, how they are built, how their drafts are trained."""
