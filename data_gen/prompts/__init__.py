"""Prompts: one module and one YAML under ``conf/dataset`` for each dataset.

A dataset has a ``name``, and is an iterable of `Prompt`s with unique ids, made by the ``_target_``
of its YAML."""

from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from data_gen.prompts.prompt import Prompt, select
from data_gen.prompts.render import dated, refuse_arguments
from runtime.errors import UserError

__all__ = ["Prompt", "load_prompts"]


def load_prompts(cfg: Any) -> list[Prompt]:
    """Return the prompts of the config group ``dataset``; ids are unique, the list is not empty,
    the order is fixed.

    Raises UserError when the dataset is missing, empty or malformed.
    """
    if "name" not in cfg:
        raise UserError("dataset.name: expected a name, for tables, got none. Add it to the YAML")
    try:
        prompts = select(list(instantiate(cfg, _convert_="all")), None)
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise
    refuse_arguments(prompts)
    return list(map(dated, prompts))
