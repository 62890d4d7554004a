from dataclasses import replace

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decoding.trace import StageTrace, Trace
from evaluation.token_texts import FILE, Vocabulary, of_traces, read, write
from tests.helpers.damage.refusals import refuses
from tests.helpers.evaluation.evaluations import chain
from tests.helpers.evaluation.evaluations import trace as decoded
from tests.helpers.models.tiny_pair import tiny_tokenizer


def trace() -> Trace:
    rounds = [chain(3, 1), chain(0, 0)]
    rounds[0].draft_tokens, rounds[0].tokens, rounds[1].tokens = [4, 5, 7], [4, 5], [9]
    rounds[0].overlap = StageTrace("draft", 1, 1, 3, 1, [[5, 6], [7]], 0, 0, [])
    return decoded(rounds, prompt="1", dataset="a")


def test_every_token_that_occurs_is_saved(tmp_path):
    found = of_traces(tiny_tokenizer(), [trace()], {("a", "1"): [3, 2]})
    assert sorted(found.tokens) == [4, 5, 6, 7, 9]
    assert found.text(6).strip() == "w6" and found.prompt(trace()) == "w3 w2"
    write(tmp_path, found)
    assert read(tmp_path) == found


def test_texts_keep_their_spaces():
    """Where decoding a token alone drops them, too."""
    words = {"▁a": 4, "▁b": 5, "c": 6, "▁d": 7, "e": 9}
    backend = Tokenizer(models.WordLevel(words, unk_token="c"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.decode([5]) == "b"
    found = of_traces(tokenizer, [trace()], {})
    assert [found.text(token) for token in (5, 6, 7, 9)] == [" b", "c", " d", "e"]


def test_without_texts_a_token_is_its_id_and_an_earlier_version_is_named(tmp_path):
    found = read(tmp_path)
    assert found == Vocabulary() and found.text(17) == "[17]" and found.prompt(trace()) == ""
    assert of_traces(tiny_tokenizer(), [], {}) == Vocabulary()
    (tmp_path / FILE).write_text('{"tokens": {"1": "a"}, "prompts": {"x/a/b": "text"}}')
    refuses("vocabulary.json is damaged or of an earlier version", read, tmp_path)


def test_a_prompt_is_not_mistaken_for_one_of_another_dataset(tmp_path):
    one = replace(trace(), dataset="x", prompt_id="a/b")
    other = replace(trace(), dataset="x/a", prompt_id="b")
    prompts = {("x", "a/b"): [3], ("x/a", "b"): [5]}
    write(tmp_path, of_traces(tiny_tokenizer(), [one, other], prompts))
    found = read(tmp_path)
    assert (found.prompt(one), found.prompt(other), found.prompt(trace())) == ("w3", "w5", "")
