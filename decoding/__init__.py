"""Speculative decoding: laws, structures, stop rules, engines and the models they run."""
