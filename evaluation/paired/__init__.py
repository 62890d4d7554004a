"""Methods compared on the same prompt: medians of paired ratios, and what the draft allows."""
