"""Is it lossless, is it faster, which threshold."""
