"""Files of measured costs."""

import json
from pathlib import Path


def write_cost(path: Path, **seconds: object) -> Path:
    path.write_text(json.dumps({"seconds": seconds, "pair": None, "measured_on": None}))
    return path
