"""llama.cpp: weights as it reads them, its server as an engine and as costs, its flags."""

import os
import sys
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from decoding.models.gguf import write_gguf
from decoding.sampling import Sampler, Warp
from evaluation.baselines import llamacpp
from serving.export.llamacpp import DRAFT, SCRIPT, LlamaCpp
from tests.helpers.damage.refusals import refuses
from tests.helpers.models.cached import SMALL, VOCAB, random_tokens, without_cache
from tests.unit.serving.test_export import told

ANSWERS = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
flags = dict(zip(sys.argv, sys.argv[1:]))
if "--broken" in sys.argv:
    sys.exit("0.01 E no such model")
most, made = int(flags.get("--spec-draft-n-max", 0)), [0, 0.0]
class Answers(BaseHTTPRequestHandler):
    def log_message(self, *given): pass
    def say(self, what):
        self.send_response(200), self.end_headers(), self.wfile.write(json.dumps(what).encode())
    def do_GET(self): self.say({{"status": "ok"}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        n = asked["n_predict"]
        accepted = n // 2 if most else 0
        rounds = n - accepted - 1
        made[0] += rounds * most; made[1] += 2.0 * rounds * most
        if most:
            said = f"#gen tokens = {{made[0]:6d}}, dur(b,g,a) = 0.1, {{made[1]}}, 0.2 ms"
            print(said, flush=True)
        milliseconds = rounds * (10.0 + 3.0 * most)
        times = {{"prompt_ms": 5.0, "predicted_n": n, "predicted_ms": milliseconds}}
        times |= {{"draft_n": made[0], "draft_n_accepted": accepted}} if most else {{}}
        self.say({{"tokens": [asked["seed"] % 7] * n if "seed" in asked else [], "timings": times}})
HTTPServer(("127.0.0.1", int(flags["--port"])), Answers).serve_forever()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**SMALL)).bfloat16().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    writer = GGUFWriter(tmp_path / "target.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{n}" for n in range(VOCAB)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "target.gguf"


@pytest.fixture
def binary(tmp_path: Path) -> Path:
    (path := tmp_path / "llama-server").write_text(ANSWERS.format(python=sys.executable))
    path.chmod(0o755)
    return path


def test_weights_are_those_of_the_folder(folder: Path, tokenizer: Path, tmp_path: Path) -> None:
    write_gguf(folder, tokenizer, tmp_path / "made.gguf")
    options = {"gguf_file": "made.gguf", "dtype": torch.float32}
    made = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    original = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = random_tokens(20, 0)
    assert torch.equal(without_cache(made, text), without_cache(original, text))


def test_what_cannot_be_written_is_refused(folder: Path, tokenizer: Path, tmp_path: Path) -> None:
    out = tmp_path / "made.gguf"
    refuses("no GGUF file", write_gguf, folder, folder / "config.json", out)
    config = folder / "config.json"
    config.write_text(config.read_text().replace(f'"vocab_size": {VOCAB}', '"vocab_size": 9'))
    refuses("another vocabulary", write_gguf, folder, tokenizer, out)
    config.write_text(config.read_text().replace("LlamaForCausalLM", "OtherForCausalLM"))
    refuses("no plain Llama", write_gguf, folder, tokenizer, out)
    refuses("missing", write_gguf, tmp_path, tokenizer, out)


def test_a_server_is_an_engine(binary: Path) -> None:
    server = llamacpp.Server(binary, "--spec-draft-n-max", "4")
    engine = llamacpp.LlamaCppEngine(server, Warp(0.0), frozenset())
    trace = engine.decode(torch.tensor([1, 2]), 8, Sampler.seeded(0))
    assert len(trace.tokens) == 8 and [len(each.tokens) for each in trace.rounds] == [5, 1, 1, 1]
    assert trace.prefill_seconds == 0.005 and trace.decode_seconds == pytest.approx(0.066)
    server.end()
    refuses("no such model", llamacpp.Server, binary, "--broken")
    refuses("make engine", llamacpp.Server, binary.with_name("none"))


def test_its_costs_are_measured(folder: Path, tokenizer: Path, binary: Path) -> None:
    models = {"target": str(folder), "draft": str(folder), "max_length": 64}
    table = llamacpp.measured_cost(models, binary, tokenizer, [1, 4], 9)
    assert table.draft == pytest.approx(0.002) and table.autoregressive == pytest.approx(0.01)
    assert table.target.rows == [2, 5] and table.target.seconds == pytest.approx([0.011, 0.014])


def tuned(speculate: bool = True, temperature: float = 0.0, **speedups: float) -> dict:
    rules = {
        name: {"threshold": value, "speculate": speculate, "speedup": speedup}
        for name, speedup in speedups.items()
        for value in [3 if name == "fixed" else 0.5]
    }
    warp = {"temperature": temperature}
    return {"draft_warp": warp, "gamma": 8, "results": {"chosen": {"rules": rules}}}


@pytest.mark.parametrize(
    ("thresholds", "flags"),
    [
        (tuned(fixed=1.5, confidence_before=1.2), "--spec-draft-n-max 3 --spec-draft-p-min 0"),
        (tuned(fixed=1.1, confidence_before=1.2), "--spec-draft-n-max 8 --spec-draft-p-min 0.5"),
        (tuned(False, fixed=0.8), ""),
    ],
)
def test_its_flags_are_those_of_the_best_rule(thresholds: dict, flags: str) -> None:
    made = LlamaCpp().export(told(thresholds=thresholds, gamma=None))
    draft = f" -md org/draft --spec-type draft-simple {flags}" if flags else ""
    assert f'llama-server -m org/target{draft} "$@"' in str(made.files[SCRIPT])
    assert any("no draft pays" in line for line in made.left_out) == (not flags)


def test_a_sampled_draft_is_left_out() -> None:
    made = LlamaCpp().export(told(thresholds=tuned(temperature=1.0, fixed=2.0)))
    assert not made.files and "sampled draft" in made.left_out[0]


def test_the_draft_comes_as_gguf(folder: Path, tokenizer: Path, tmp_path: Path) -> None:
    given = told(thresholds=tuned(fixed=2.0), draft=str(folder), target=str(tokenizer))
    write = LlamaCpp().export(given).files[DRAFT]
    assert callable(write)
    write(tmp_path / DRAFT)
    assert (tmp_path / DRAFT).stat().st_size > 2 * 32 * VOCAB


@pytest.mark.slow
@pytest.mark.skipif(not Path(".engine/llama-server").exists(), reason="`make engine` was not run")
def test_the_real_server_says_what_we_say() -> None:
    from decoding.engines.autoregressive import AutoregressiveEngine
    from decoding.pair import open_pair

    cache = os.environ.get("DRAFTPREDICT_CACHE", "~/.cache/draftpredict")
    home = Path(cache).expanduser() / "smollm2"
    models = {"target": home / "target", "draft": home / "draft", "max_length": 512}
    flags = llamacpp._speculating("draft-simple", 4)
    like = home / "SmolLM2-135M-Instruct.Q4_1.gguf"
    server = llamacpp._started(models, Path(".engine/llama-server"), like, flags)
    pair = open_pair(home / "target", home / "draft")
    prompt = pair.tokenizer("def fibonacci(n):", return_tensors="pt").input_ids[0]
    ours = AutoregressiveEngine(pair, Warp(0.0)).decode(prompt, 32, Sampler.seeded(0))
    theirs = llamacpp.LlamaCppEngine(server, Warp(0.0), frozenset())
    assert theirs.decode(prompt, 32, Sampler.seeded(0)).tokens == ours.tokens
    assert server.drafting()[0] > 0
