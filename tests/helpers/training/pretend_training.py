"""Train every predictor on a pretend device:
``python -m tests.helpers.training.pretend_training HARVEST OUT``.

In a process of its own. A backward pass asks torch who drives its device. Nobody drives ``cuda`` in
a build without it, so the device has another name here, ``accel``, which torch lets Python
register once a process."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import Accelerator
from hydra.utils import instantiate
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch.utils import backend_registration

from data_gen.samples import inputs_of, read_samples
from data_gen.storage.dataset import Harvest
from predictors.base import Predictor
from predictors.training.trainer import Trainer
from tests.helpers.device.pretend_device import Pretend, pretend

CONF = Path(__file__).parents[3] / "conf"
NAMES = sorted(path.stem for path in (CONF / "predictor").glob("*.yaml"))
SETTINGS = {"epochs": 3, "lr": 2e-2, "batch_size": 4, "accumulate": 2}
LABELS: Mapping[str, dict[str, object]] = {"value": {"inputs": ["draft_hidden"]}}


def trained(name: str, harvest: Path) -> tuple[Predictor, Trainer]:
    """With the seed of its recipe; a pretend device draws its dropout on the host, too."""
    config = OmegaConf.load(CONF / "predictor" / f"{name}.yaml")
    predictor: Predictor = instantiate(config, **LABELS.get(name, {}))
    recipe = OmegaConf.merge(OmegaConf.load(CONF / "trainer" / f"{name}.yaml"), SETTINGS)
    trainer: Trainer = instantiate(recipe)
    data = Harvest.open(harvest)
    samples = read_samples(data, predictor, "train")
    return predictor.fit(samples, inputs_of(data, predictor), trainer), trainer


def main(harvest: Path, out: Path) -> None:
    backend_registration._setup_privateuseone_for_python_backend("accel")
    torch.__future__.set_swap_module_params_on_conversion(True)  # an optimizer knows them already
    Pretend.kind = "accel"
    Accelerator.device = torch.device("accel:0")  # type: ignore[assignment]
    for name in NAMES:
        with pretend() as counts:
            predictor, trainer = trained(name, harvest)
        save_file(predictor.head.state_dict(), out / f"{name}.safetensors")
        waits = counts.synchronisations.total() - counts.transfers["to device"]
        found = {"history": trainer.history, "waits": waits, "moved": counts.bytes["to device"]}
        (out / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*map(Path, sys.argv[1:]))
