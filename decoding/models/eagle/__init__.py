"""Drafts that read their target's hidden states: our own kind (`maps`), and EAGLE-1 and EAGLE-3
(`eagle3`) from the checkpoints people have (`formats`, `checkpoint`)."""
