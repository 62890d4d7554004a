"""A program that answers as vLLM's process does, in the place of its Python."""

import sys
from pathlib import Path

PROGRAM = """#!{python}
import json, sys
assert sys.argv[1:3] == ["-m", "runtime.vllm_worker"]
facts = json.loads(sys.argv[3])
if "broken" in facts["model"]:
    print("ValueError: no such model", file=sys.stderr)
    sys.exit(1)
speculative = facts.get("speculative_config") or {{}}
drafts = speculative.get("method") == "draft_model"
print(json.dumps({{"ready": True}}), flush=True)
answered = 0
for line in sys.stdin:
    asked = json.loads(line)
    most, size = asked["max_tokens"], len(asked["prompts"])
    assert asked["at_once"] is None or asked["at_once"] <= size
    answered += size
    if {dies} and answered > {dies}:
        print("RuntimeError: out of memory", file=sys.stderr)
        sys.exit(1)
    tokens = [[(sum(prompt) + n) % 7 + 1 for n in range(most)] for prompt in asked["prompts"]]
    if speculative.get("method") == "ngram":
        tokens[0][-1] += 1
    rows = 1 + speculative.get("num_speculative_tokens", 0)
    if path := facts.get("additional_config", {{}}).get("draftpredict_rows"):
        rows = 1 + int(open(path).read())
    accepted = size * (most // 2) if drafts else 0
    steps = most - accepted / size - 1
    said = {{"tokens": tokens, "reasons": ["length"] * size, "draft_tokens": 2 * accepted}}
    said |= {{"seconds": size * 0.01 + steps * (0.01 + 0.001 * size * rows), "drafts": accepted}}
    said |= {{"accepted_tokens": accepted, "per_position": [accepted] if accepted else []}}
    print(json.dumps(said), flush=True)
"""


def pretend_vllm(folder: Path, dies: int = 0) -> Path:
    """dies: after so many answers; 0: never."""
    program = folder / f"vllm-python-{dies}"
    program.write_text(PROGRAM.format(python=sys.executable, dies=dies))
    program.chmod(0o755)
    return program
