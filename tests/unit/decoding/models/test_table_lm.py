import torch

from decoding.models.table_lm import TableLM, mixed_table, random_table


def test_distributions_depend_on_seed_and_recent_context_only():
    lm, again, other = (TableLM(random_table(4, seed)) for seed in (1, 1, 2))
    assert torch.equal(lm.distribution((3, 1, 2)), again.distribution((0, 1, 2)))
    assert not torch.equal(lm.distribution((3, 1)), other.distribution((3, 1))) and not torch.equal(
        lm.distribution((3, 1)), lm.distribution((1, 3))
    )
    torch.testing.assert_close(lm.distribution(()).sum().item(), 1.0)


def test_cache_gives_the_distribution_of_the_whole_context():
    lm = TableLM(random_table(4, seed=1))
    lm.forward(torch.tensor([1, 2, 3]), logits="none")
    output = lm.forward(torch.tensor([0, 1]), hidden=range(-3, 0))
    expected = torch.stack([lm.distribution((3, 0)), lm.distribution((0, 1))])
    torch.testing.assert_close(output.logits.exp(), expected)
    assert output.hidden.shape == (3, 2, 4) and lm.length == 5
    assert lm.forward(torch.tensor([2, 2]), logits="last").logits.shape == (1, 4)
    found = lm.forward(torch.tensor([0, 1]), logits=[1]).logits[0].exp()
    assert torch.equal(found, lm.distribution((0, 1)))
    lm.crop(3)
    found = lm.forward(torch.tensor([0])).logits.exp()[0]
    torch.testing.assert_close(found, lm.distribution((3, 0)))
    lm.reset()
    assert lm.length == lm.forwards == 0


def test_mixed_table():
    first, second = random_table(3, 1), random_table(3, 2)
    expected = 0.25 * first((1,)) + 0.75 * second((1,))
    torch.testing.assert_close(mixed_table(first, second, 0.25)((1,)), expected)
