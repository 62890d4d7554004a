"""Write what a serving engine reads: temperatures, costs, draft lengths by batch size, thresholds.

    python scripts/export.py serving=sglang confidences=checkpoints/confidences
    python scripts/export.py serving=vllm schedule=runs/schedule.json
    python scripts/export.py serving=tensorrt_llm schedule=runs/schedule.json costs=runs/costs.json
    python scripts/export.py serving=deepspec confidences=checkpoints/confidences
    python scripts/export.py serving=transformers thresholds=runs/thresholds.json gamma=8
    python scripts/export.py serving=llamacpp thresholds=runs/thresholds.json target_model=x.gguf
    python scripts/export.py serving=hub serving.checkpoint=checkpoints/hrad out=runs/published

Give what there is of `confidences`, `costs`, `schedule` and `thresholds`. Writes to `out` the files
of the engine, the command to paste, the versions it was checked for, and what could not be carried
over (README.md and export.json). No model runs.

`serving=hub` makes of a checkpoint the folder that the Hugging Face hub shows: with a model card, a
reliability plot and the `thresholds` that tune.py chose for it, without the paths of this machine
and keys among the settings. With `serving.repository` it is sent there (log in with `hf auth
login`); what is sent is that folder, so look at it first. Loaded by predictors.hub.from_pretrained
and by `predictor=` inside generate."""

from __future__ import annotations

import pathlib
from os.path import expanduser
from typing import TYPE_CHECKING, Annotated

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate

from runtime.cli import program
from runtime.errors import UserError
from runtime.files import checked_folder, only_writer, refuse_foreign, replaced_folder
from runtime.job import command_line
from runtime.json_files import write_checksummed
from runtime.settings.kinds import DraftLength, Group, Output, Part, Path, Text

if TYPE_CHECKING:
    from serving.export.base import Given


class Export(Group):
    serving: Annotated[Part, "the engine"]
    confidences: Annotated[
        Path | None, "folder that train.py has made of imported confidences; null: none"
    ]
    costs: Annotated[
        Path | None, "what cost=measure of tune.py has saved, or your own file; null: none"
    ]
    schedule: Annotated[Path | None, "file of draft lengths by requests at once; null: none"]
    thresholds: Annotated[Path | None, "what tune.py has written; null: none"]
    gamma: Annotated[
        DraftLength | None, "draft tokens of a step at most; null: those of `confidences`"
    ]
    target_model: Annotated[
        Text, "the target as the engine is told of it, for the command to paste"
    ]
    draft_model: Annotated[Text, "the same of the draft"]
    verbose: Annotated[bool, "print README.md"]
    out: Annotated[Output, "folder of the files"]


@program(__file__, Export)
def main(settings: Export) -> None:
    """Export files for a serving engine, or a folder for the hub."""
    from reports.publish import publish
    from serving.export.base import MARKER, Engine, Hub

    out = checked_folder("out", settings.out)
    engine: Engine | Hub = instantiate(settings.serving)
    if isinstance(engine, Hub):
        publish(engine, out, settings.thresholds)
        return
    refuse_foreign(out, MARKER)
    name = str(HydraConfig.get().runtime.choices["serving"])
    made = engine.export(given(settings))
    if not made.files:
        why = f" ({made.left_out[0]})" if made.left_out else ""
        raise UserError(
            f"serving: nothing that was given can be told {name}{why}. Give"
            " confidences=, costs=, schedule= or thresholds=, which scripts/tune.py writes"
        )
    text = made.page(name, command_line())
    with only_writer(out), replaced_folder(out, MARKER) as folder:
        for file, content in made.files.items():
            if isinstance(content, str):
                (folder / file).write_text(content, encoding="utf-8")
            else:
                content(folder / file)
        write_checksummed(folder / MARKER, made.facts(name, folder, command_line()))
        (folder / "README.md").write_text(text + "\n", encoding="utf-8")
    print(f"{text if settings.verbose else made.answer(name)}\nsaved in {out}")


def given(settings: Export) -> Given:
    """Read the inputs of the export. Raises UserError for invalid files, and for another gamma than
    that of `confidences`."""
    from decoding.cost import read_cost
    from evaluation.replay import thresholds
    from predictors.confidences.maps import read_maps
    from serving.export.base import Given
    from serving.schedule import read_schedule

    calibration, gamma = None, settings.gamma
    if settings.confidences is not None:
        calibration = read_maps(str(settings.confidences), "confidences")
        if gamma not in (None, calibration["gamma"]):
            raise UserError(
                f"gamma: expected {calibration['gamma']}, as in {settings.confidences}, got"
                f" {gamma}. Leave it out"
            )
        gamma = calibration["gamma"]
    costs, schedule, tuned = settings.costs, settings.schedule, settings.thresholds
    return Given(
        calibration=calibration,
        costs=None if costs is None else read_cost(str(costs), "costs"),
        schedule=None if schedule is None else read_schedule(str(schedule)),
        thresholds=None if tuned is None else thresholds.read(pathlib.Path(tuned)),
        gamma=gamma,
        target=expanduser(settings.target_model),
        draft=expanduser(settings.draft_model),
        folder=str(settings.out),
    )


if __name__ == "__main__":
    main()
