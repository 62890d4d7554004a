"""Draw every figure and table that evaluations, harvests, checkpoints and tunings allow, as one
page to look at.

    python scripts/report.py                      # of all that is in runs, data and checkpoints
    python scripts/report.py run=runs/smollm2-eagle-starter-T1.0
    python scripts/report.py run=[runs,data/rounds] out=runs/rounds-report

Folders are searched with the folders in them. Writes index.html, which needs no network and none of
the other files, a PNG and a CSV of each figure, and report.json, which lists them; an earlier
report in `out` is replaced. What lacks its input is named at the end of the page, with the command
that makes it."""

from typing import Annotated

from pydantic import Field

from runtime.cli import program
from runtime.files import checked_folder, only_writer, refuse_foreign
from runtime.settings.groups import Logger
from runtime.settings.kinds import Group, Output, Path, Text


class Report(Group):
    logger: Logger
    run: Annotated[
        Path | Annotated[list[Path], Field(min_length=1)] | None,
        "folder, or a list of them, each searched with the folders in it; null: runs, data and"
        " checkpoints",
    ]
    out: Annotated[Output, "folder of index.html, a PNG and a CSV of each figure, report.json"]
    figures: Annotated[
        list[Text],
        "packages of figures, in the order of the page, installed or in the working directory; one"
        " that is neither is left out",
    ]


@program(__file__, Report)
def main(settings: Report) -> None:
    """Make a page from the artifacts in folders."""
    from evaluation import token_texts
    from reports.artifacts import REPORT, gather
    from reports.report import searched, write

    out = checked_folder("out", settings.out)
    refuse_foreign(out, REPORT)
    artifacts = gather(searched(settings.run))
    texts = {
        evaluation.folder: token_texts.read(evaluation.folder)
        for evaluation in artifacts.evaluations
    }
    with only_writer(out):
        sections, lacking = write(settings, artifacts, texts, out)
    print(f"{sum(len(section.shown) for section in sections)} figures and tables")
    if lacking:
        print(f"{len(lacking)} more need other runs; the end of the page has the command for each")
    print(f"saved {out / 'index.html'}")


if __name__ == "__main__":
    main()
