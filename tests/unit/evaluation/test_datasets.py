"""All prompts together beside each dataset, whatever the datasets are called."""

import pytest

from evaluation.datasets import ByDataset, shown_as

NAMES = ["all", "pooled", "datasets", '"all"', '""all""', "", "all "]


def test_no_name_of_a_dataset_hides_all_of_them() -> None:
    found = ByDataset.of(NAMES, lambda name: 0 if name is None else 1 + NAMES.index(name))
    assert found.pooled == 0
    assert found.datasets == {name: 1 + place for place, name in enumerate(NAMES)}
    shown = dict(found.each(str).shown())
    assert shown["all"] == "0" and shown['"all"'] == "1" and shown["pooled"] == "2"
    assert len(shown) == 1 + len(NAMES), "each is called something else"


@pytest.mark.parametrize("name", ["odd", "all"])
def test_one_dataset_is_all_of_them(name: str) -> None:
    assert ByDataset.of([name, name], lambda part: part) == ByDataset(None, {})


def test_a_name_is_shown_as_it_is_where_it_can_be() -> None:
    assert [shown_as(name) for name in ("odd", "all", "All")] == ["odd", '"all"', "All"]
