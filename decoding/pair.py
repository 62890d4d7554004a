"""A pair of models from Python, without a config file."""

from os.path import expanduser
from typing import Any

from omegaconf import OmegaConf

from decoding.models.loading import ModelPair, load_pair
from decoding.settings import Pair
from runtime.errors import UserError

SETTINGS: dict[str, Any] = {
    "name": "pair",
    "dtype": "auto",
    "target_dtype": "${.dtype}",
    "draft_dtype": "${.dtype}",
    "target_device": "cpu",
    "draft_device": "cpu",
    "target_options": {},
    "draft_options": {},
    "draft_vocabulary": "auto",
    "draft_mix": 1.0,
    "trust_remote_code": False,
    "max_length": 2048,
}
"""Those of `conf/pair`, which explains each, with the same defaults."""


def open_pair(target: str, draft: str, **settings: Any) -> ModelPair:
    """Load two Hugging Face causal models that share a vocabulary.

    target, draft: hub ids or folders; `~` is the home folder. settings: keys of `conf/pair`, such
    as ``dtype="bfloat16"`` or ``target_device="cuda:0"``.

    Raises UserError for an unknown setting, a model that is missing, and two vocabularies that
    differ."""
    unknown = sorted(settings.keys() - SETTINGS.keys())
    if unknown:
        raise UserError(
            f"{unknown[0]}: expected one of {', '.join(SETTINGS)}, got an unknown setting. Leave"
            " it away"
        )
    return load_pair(pair_settings(target=expanduser(target), draft=expanduser(draft), **settings))


def pair_settings(**settings: Any) -> Pair:
    """Return the settings of a pair, with the defaults of those that are not given."""
    return Pair.of(OmegaConf.create({**SETTINGS, **settings}))
