"""Published EAGLE drafts: rows do not depend on how they came into the cache, and are those of the
definition."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from decoding.engines.serial import SerialEngine
from decoding.models.cached_lm import CachedLM
from decoding.models.eagle.published import Flavour, PublishedModel
from decoding.models.loading import ModelPair
from decoding.sampling import Sampler, Warp
from decoding.stopping.never import Never
from decoding.structures.chain import Chain
from decoding.structures.dyspec import DySpecHeap
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.token import TokenVerifier
from tests.helpers.models.eagles import FLAVOURS, SAYS, published_pair
from tests.invariant.test_eagle_draft import cache

TEXT = torch.randint(1, 32, (12,), generator=torch.Generator().manual_seed(3))
CLOSE = dict(rtol=1e-5, atol=1e-6)
KINDS = [*FLAVOURS.items(), ("two_layers", FLAVOURS["each"]), ("qwen3", FLAVOURS["residual"])]


def pair_of(name: str, flavour: Flavour, vocabulary: Tensor | None = SAYS) -> ModelPair:
    """Two layers, or Qwen3's, where the name says so."""
    more = {"layers": 2} if name == "two_layers" else {"qwen": name == "qwen3"}
    return published_pair(flavour, vocabulary, attention_bias=name == "each", **more)


def rms(x: Tensor, norm: torch.nn.Module) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], norm.weight, 1e-6)


@torch.no_grad()
def written_out(model: PublishedModel, states: Tensor, tokens: Tensor, drafted: int) -> Tensor:
    """Logits [n] of the last of `tokens` [n + 1], whose first one has no row; the last `drafted`
    rows are fed what came before. states: [n - drafted, L + 1, H]. One layer, EAGLE-3."""
    flavour, layer = model.flavour, model.layers[0]
    g = states[:, :-1]
    if flavour.fc_norm:
        g = torch.stack([rms(g[:, i], norm) for i, norm in enumerate(model.fc_norm)], 1)
    g = g.flatten(1)
    features = list(model.fc(rms(g, model.input_norm) if flavour.norm_before_fc else g))
    keys, values, attention = [], [], layer.self_attn
    for position, token in enumerate(tokens[1:], 1):
        f, e = features[position - 1], model.embed_tokens.weight[token]
        normed = rms(f, layer.hidden_norm)
        u = torch.cat([rms(e, layer.input_layernorm), normed])
        angle = position * 10000.0 ** (-torch.arange(0, 6, 2) / 6).double()
        turn = torch.polar(torch.ones(3).double(), angle)

        def heads(linear: torch.nn.Module, turned: bool = True, u=u, turn=turn) -> Tensor:
            x = linear(u).view(-1, 6)
            if not turned:
                return x
            found = torch.complex(x[:, :3], x[:, 3:]) * turn
            return torch.cat([found.real, found.imag], 1)

        keys.append(heads(attention.k_proj).repeat_interleave(2, 0))
        values.append(heads(attention.v_proj, False).repeat_interleave(2, 0))
        scores = torch.einsum("hd,khd->hk", heads(attention.q_proj), torch.stack(keys)) / 6**0.5
        read = torch.einsum("hk,khd->hd", scores.softmax(-1), torch.stack(values)).flatten()
        x = (normed if flavour.norm_before_residual else f) + attention.o_proj(read)
        x = x + layer.mlp(rms(x, layer.post_attention_layernorm))
        out = rms(x, model.norm) if flavour.final_norm else x
        if position > len(states) - 1:
            features.append(out if flavour.norm_output else x)
    return model.lm_head(out)


@pytest.mark.parametrize("name", [name for name in FLAVOURS if name != "eagle1"])
def test_logits_are_those_of_the_definition(name: str) -> None:
    """The last of three drafted tokens, after eight verified ones."""
    pair = published_pair(FLAVOURS[name], SAYS, attention_bias=name == "each")
    pair.target.forward(TEXT[:8])
    expected = written_out(pair.draft.model, pair.target.states[:8], TEXT[:12], drafted=3)
    pair.draft.forward(TEXT[:9])
    for row in (9, 10, 11):
        found = pair.draft.forward(TEXT[row : row + 1]).logits[-1]
    torch.testing.assert_close(found[SAYS].double(), expected, **CLOSE)
    assert found.isfinite().nonzero().flatten().tolist() == SAYS.tolist()


@pytest.mark.parametrize(("name", "flavour"), KINDS)
def test_one_by_one_is_all_at_once(name: str, flavour: Flavour) -> None:
    pair = pair_of(name, flavour)
    pair.target.forward(TEXT)
    whole = pair.draft.forward(TEXT).logits
    pair.draft.reset()
    parts = [pair.draft.forward(TEXT[i : i + 1]).logits for i in range(len(TEXT))]
    torch.testing.assert_close(torch.cat(parts), whole, **CLOSE)
    assert len(whole.argmax(-1).unique()) > 1


@pytest.mark.parametrize(("name", "flavour"), KINDS)
def test_a_tree_is_its_paths(name: str, flavour: Flavour) -> None:
    pair, parents = pair_of(name, flavour), [[-1, -1], [0, 0, 1], [2, 4]]
    tokens, grown, found = [[5, 9], [3, 4, 6], [8, 2]], [], []
    pair.target.forward(TEXT[:6])
    pair.draft.forward(TEXT[:7])
    for some, of, extend in zip(tokens, parents, (False, True, True), strict=True):
        output = pair.draft.forward(torch.tensor(some), torch.tensor(of), extend=extend)
        grown += [[*(grown[p] if p >= 0 else []), t] for t, p in zip(some, of, strict=True)]
        found.append(output.logits)
    for path, logits in zip(grown, torch.cat(found), strict=True):
        pair.draft.crop(7)
        for token in path:
            alone = pair.draft.forward(torch.tensor([token])).logits[-1]
        torch.testing.assert_close(logits, alone, **CLOSE)


@pytest.mark.parametrize(("name", "flavour"), KINDS)
def test_what_a_text_begins_with_only_it_sees(name: str, flavour: Flavour) -> None:
    """Published drafts have no row for the first token."""
    pair = pair_of(name, flavour)
    pair.target.forward(TEXT)
    before = pair.draft.forward(TEXT).logits
    pair.draft.reset()
    other = TEXT.clone()
    other[0] = 31 - other[0]
    after = pair.draft.forward(other).logits  # the target's states are the same
    torch.testing.assert_close(before[1:], after[1:], rtol=0, atol=0)
    assert not torch.equal(before[0], after[0])


@pytest.mark.parametrize("builds", [Chain(3), DySpecHeap(6)])
@pytest.mark.parametrize(("name", "flavour"), KINDS)
def test_greedy_output_is_the_targets_and_nothing_stays_of_a_round(
    name: str, flavour: Flavour, builds: Chain | DySpecHeap
) -> None:
    pair = pair_of(name, flavour)
    verifier = TokenVerifier() if isinstance(builds, Chain) else RrswVerifier()
    engine = SerialEngine(pair, builds, Never(), verifier, Warp(0.0), Warp())
    prompt = TEXT[:4]
    found, text = engine.decode(prompt, 16, Sampler.seeded(0)).tokens, prompt
    for _ in found:
        last = CachedLM(pair.target.model).forward(text, logits="last").logits[-1]
        text = torch.cat([text, last.argmax()[None]])
    assert found == text[len(prompt) :].tolist()
    length = pair.draft.length
    left = cache(pair.draft)
    pair.draft.reset()
    pair.draft.forward(text[:length])
    for ours, fresh in zip(left, cache(pair.draft), strict=True):
        torch.testing.assert_close(ours, fresh, **CLOSE)
