"""Our proposer inside the real vLLM (make vllm), with a tiny target and a draft that agrees with it
now and then."""

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers import LlamaConfig, LlamaForCausalLM

from runtime.vllm_process import ENVIRONMENT, ROOT, Worker
from tests.helpers.models.tiny_pair import VOCAB, tiny_tokenizer

PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / ENVIRONMENT))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.is_file(), reason="vLLM is not there (make vllm)"),
]
AT_ONCE, DRAWS = 8, 50_000
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=256,
    initializer_range=0.12,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=0,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    torch.manual_seed(3)
    target, draft = LlamaForCausalLM(CONFIG), LlamaForCausalLM(CONFIG)
    with torch.no_grad():
        for theirs, ours in zip(draft.parameters(), target.parameters(), strict=True):
            theirs.copy_(ours + 0.03 * torch.randn_like(ours))
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    return folder


def worker(pair: Path, stop: dict[str, Any] | None, **more: Any) -> Worker:
    """stop: the rule of the proposer, which copies as well; None: no draft."""
    arguments: dict[str, Any] = {
        "model": str(pair / "target"),
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": AT_ONCE,
        "enable_prefix_caching": False,
        "block_size": 32,
        **more,
    }
    if stop is not None:
        structure = {"_target_": "decoding.structures.sources.Sources", "gamma_max": 5}
        facts = {
            "format_version": 1,
            "draft": str(pair / "draft"),
            "dtype": "float32",
            "structure": structure | {"ngram_max": 3, "ngram_min": 2, "stretch": 2},
            "stop": stop,
            "adaptive": False,
        }
        file = pair / "proposer.json"
        file.write_text(json.dumps(facts))
        arguments["additional_config"] = {"draftpredict": str(file)}
        arguments["speculative_config"] = {
            "method": "custom_class",
            "model": "serving.vllm.Proposer",
            "num_speculative_tokens": 5,
        }
    return Worker(PYTHON, "engine", 1, **arguments)


CONFIDENCE = {"_target_": "decoding.stopping.confidence.Confidence", "threshold": 0.3}


def test_outputs_are_those_without_a_draft_whatever_is_put_off(pair: Path) -> None:
    random.seed(1)
    prompts = [random.choices(range(1, VOCAB), k=random.randint(3, 40)) for _ in range(200)]
    greedy = {"temperature": 0.0, "max_tokens": 48}
    plain = worker(pair, None)
    alone = plain.ask(prompts, [0] * len(prompts), AT_ONCE - 1, **greedy)["tokens"]
    plain.end()
    drafted = worker(pair, CONFIDENCE, num_gpu_blocks_override=12)
    said = drafted.ask(prompts, [0] * len(prompts), **greedy)
    drafted.end()
    assert said["preemptions"] > 0 and said["accepted_tokens"] > 0
    assert said["tokens"] == alone


def test_sampled_tokens_have_the_distribution_of_the_target(pair: Path) -> None:
    """The first token comes without a draft, the others with one."""
    sampled = {"temperature": 1.0, "max_tokens": 3, "ignore_eos": True}
    prompt, counts = [5, 9, 2], Counter[tuple[int, ...]]()
    drafted = worker(pair, CONFIDENCE)
    said: dict[str, Any] = {}
    for first in range(0, DRAWS, 5_000):
        said = drafted.ask([prompt] * 5_000, list(range(first, first + 5_000)), **sampled)
        counts.update(tuple(tokens[:3]) for tokens in said["tokens"])
    drafted.end()
    assert said["accepted_tokens"] > 0
    expected = distribution(LlamaForCausalLM.from_pretrained(pair / "target").double(), prompt)
    frequent = [path for path, share in expected.items() if share * DRAWS >= 5]
    seen = [counts[path] for path in frequent]
    wanted = [expected[path] * DRAWS for path in frequent]
    rest = DRAWS - sum(wanted)
    assert chisquare([*seen, DRAWS - sum(seen)], [*wanted, rest]).pvalue > 1e-3


@torch.inference_mode()
def distribution(model: LlamaForCausalLM, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """That of the next three tokens."""
    texts, shares = [()], torch.ones(1, dtype=torch.float64)
    for _ in range(3):
        ids = torch.tensor([[*prompt, *text] for text in texts])
        shares = (shares[:, None] * model(ids).logits[:, -1].softmax(-1)).flatten()
        texts = [(*text, token) for text in texts for token in range(VOCAB)]
    return dict(zip(texts, shares.tolist(), strict=True))
