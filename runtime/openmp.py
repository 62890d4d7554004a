"""Import this before torch: how OpenMP's threads wait for each other.

The threads of a parallel loop meet at its end, and GNU OpenMP lets the early ones spin there for
minutes. Beside another busy process one of them has no core, and all the others spin until the
system gives it one. After `SPINS` turns a thread now sleeps: few enough to help beside another
process, enough not to slow a quiet machine (papers/lab-notes.md has both for several numbers).

The library reads its environment once, when torch loads it. Whoever has set `GOMP_SPINCOUNT` or
`OMP_WAIT_POLICY` keeps what they have set."""

import os

SPINS = 10_000
CHOICES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")

if not any(choice in os.environ for choice in CHOICES):
    os.environ["GOMP_SPINCOUNT"] = str(SPINS)
