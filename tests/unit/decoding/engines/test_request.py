import torch

from decoding.engines.request import RequestState


def request(max_new: int = 5, ends=None, eos: frozenset[int] = frozenset()) -> RequestState:
    text = torch.zeros(2 + max_new, dtype=torch.long)
    return RequestState(text, text[:2], max_new, eos, ends=ends)


def test_a_response_ends_after_the_first_committed_token_that_says_so():
    one = request(ends=lambda text: bool(text[-1] == 7))

    assert one.commit([1, 2]) == [1, 2] and not one.finished
    assert one.commit([3, 7, 4]) == [3, 7]
    assert one.finished and one.committed.tolist() == [0, 0, 1, 2, 3, 7] and one.max_new == 1


def test_whoever_ends_a_response_hears_every_token_an_eos_included():
    heard = []
    one = request(ends=lambda text: heard.append(text.tolist()), eos=frozenset({2}))  # type: ignore

    one.commit([1, 2, 3])

    assert heard == [[0, 0, 1], [0, 0, 1, 2]] and one.finished
