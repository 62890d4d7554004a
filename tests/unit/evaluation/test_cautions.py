"""What is said of a method that runs with a setting nobody chose."""

from types import SimpleNamespace

from omegaconf import OmegaConf

from evaluation.methods import Method, cautions


def test_a_method_that_nothing_was_chosen_for_says_its_caution() -> None:
    careful, other = SimpleNamespace(caution="not tuned"), SimpleNamespace()
    engines = {
        "untuned": SimpleNamespace(stop=careful),
        "tuned": SimpleNamespace(stop=careful),
        "without": SimpleNamespace(stop=other),
        "plain": SimpleNamespace(),
    }
    empty = OmegaConf.create({})
    methods = {name: Method(name, empty) for name in engines}
    methods["tuned"] = Method("tuned", empty, note="stop.threshold=0.4, tuned")
    assert cautions(methods, engines) == ["warning: untuned: not tuned"]
