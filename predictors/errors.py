"""The one exception a user is meant to read."""


class UserError(Exception):
    """Wrong input, said in one line that names the config key and the remedy.

    Write it as ``UserError("pair.draft: no such folder 'x'. Run: python scripts/build_pair.py")``. Scripts print it
    after ``error:`` and exit with code 2 (`predictors.cli`).
    """
