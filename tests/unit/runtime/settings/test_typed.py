"""Settings as an object: attributes for what is set, nodes for what hydra makes."""

from typing import Annotated

from omegaconf import OmegaConf

from runtime.settings.kinds import Count, Counts, Group, Part


class Inner(Group):
    count: Count


class Outer(Group):
    inner: Inner
    named: dict[str, Inner]
    part: Annotated[Part | Inner, "made, or settings"]
    counts: Counts
    absent: Count | None


def test_groups_are_objects_and_parts_stay_nodes() -> None:
    cfg = OmegaConf.create(
        {
            "inner": {"count": "${counts.0}"},
            "named": {"a": {"count": 2}},
            "part": {"_target_": "builtins.dict", "x": 1},
            "counts": [3, 4],
        }
    )
    settings = Outer.of(cfg)
    assert settings.inner.count == 3 and settings.named["a"].count == 2
    assert settings.part is cfg.part and settings.composed is cfg
    assert settings.counts == [3, 4] and settings.absent is None
    cfg.part = {"count": 5}
    assert Outer.of(cfg).part.count == 5  # type: ignore[attr-defined]
