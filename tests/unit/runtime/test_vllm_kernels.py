"""What stands in for a kernel of vLLM's CPU build."""

import pytest
import torch

from runtime.vllm_kernels import expanded


@pytest.mark.parametrize(
    "values, ends, replaced, expected",
    [
        ([0.5, 0.0, 0.7], [2, 3, 5], (0, 1), [0.5, 0.5, 1.0, 0.7, 0.7]),
        ([0.5, 0.25], [0, 2], (0, 1), [0.25, 0.25]),
        ([3, 0], [1, 2], (0, 9), [3, 9]),
    ],
)
def test_values_are_repeated_and_replaced(
    values: list[float], ends: list[int], replaced: tuple[int, int], expected: list[float]
) -> None:
    given = torch.tensor(values)
    output = torch.full((len(expected),), -7, dtype=given.dtype)
    expanded(output, given, torch.tensor(ends, dtype=torch.int32), *replaced)
    assert torch.equal(output, torch.tensor(expected, dtype=given.dtype))
