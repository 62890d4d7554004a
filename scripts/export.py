"""Write what a serving engine reads: temperatures, costs, draft lengths by batch size, thresholds.

    python scripts/export.py serving=sglang confidences=checkpoints/confidences
    python scripts/export.py serving=vllm schedule=runs/schedule.json
    python scripts/export.py serving=tensorrt_llm schedule=runs/schedule.json costs=runs/costs.json
    python scripts/export.py serving=deepspec confidences=checkpoints/confidences
    python scripts/export.py serving=transformers thresholds=runs/thresholds.json gamma=8
    python scripts/export.py serving=hub serving.checkpoint=checkpoints/hrad out=runs/published

Give what there is of `confidences`, `costs`, `schedule` and `thresholds`. Writes to `out` the files
of the engine, the command to paste, the versions it was checked for, and what could not be carried
over (README.md and export.json). No model runs.

`serving=hub` makes of a checkpoint the folder that the Hugging Face hub shows: with a model card, a
reliability plot and the `thresholds` that tune.py chose for it, without the paths of this machine
and keys among the settings. With `serving.repository` it is sent there (log in with `hf auth
login`); what is sent is that folder, so look at it first. Loaded by predictors.hub.from_pretrained
and by `predictor=` inside generate."""

from typing import Annotated

from runtime.cli import Program
from runtime.settings.kinds import DraftLength, Group, Output, Part, Path, Text


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
    out: Annotated[Output, "folder of the files"]


main = Program(__file__, Export, "programs.serving.export")

if __name__ == "__main__":
    main()
