"""Prompts: one module per source, one YAML per source under ``conf/dataset``."""

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig

from data_gen.prompts.prompt import Prompt
from runtime.errors import UserError

__all__ = ["Prompt", "load_prompts"]


def load_prompts(cfg: DictConfig) -> list[Prompt]:
    """The prompts of the config group ``dataset``; ids are unique, the list is not empty, the order
    is fixed.

    Raises UserError when the source is missing, empty or malformed.
    """
    try:
        return list(instantiate(cfg))
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise
