"""Speculative decoding: distributions, structures, stop rules, engines and the models they run."""
