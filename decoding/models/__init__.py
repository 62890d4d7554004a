"""Models behind one interface: loading, caches, CPU kernels, EAGLE-style drafts."""
