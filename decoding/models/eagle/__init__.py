"""Drafts that read their target's hidden states: our own kind (`draft`), and EAGLE-1 and EAGLE-3
(`published`) from the checkpoints people have (`checkpoint`)."""
