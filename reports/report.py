"""Draw every figure and table that evaluations, harvests, checkpoints and tunings allow, as one
page to look at."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from evaluation.token_texts import Vocabulary
from reports.artifacts import Artifacts
from reports.figure import Builder, Figure, Missing, save
from reports.figure_registry import builders, figure_registry
from reports.find_artifacts import REPORT
from reports.page import Lack, Section, Shown, page
from reports.viewer.viewer import fragment
from runtime.errors import UserError
from runtime.files import file_name, replaced_folder, write_json
from runtime.job import command_line

DEFAULT = ("runs", "data", "checkpoints")


def write(
    cfg: DictConfig, artifacts: Artifacts, texts: Mapping[Path, Vocabulary], out: Path
) -> tuple[list[Section], list[Lack]]:
    """Make and log the report in `out`. texts: of tokens, by the evaluation's folder. Returns what
    there is, by section, and what is lacking altogether."""
    logger = instantiate(cfg.logger)
    logger.start("report", OmegaConf.to_container(cfg, resolve=True))
    try:
        with replaced_folder(out, REPORT) as folder:
            sections, lacking = build(artifacts, cfg.figures, folder)
            text = page(artifacts, sections, lacking, fragment(artifacts.evaluations, texts))
            (folder / "index.html").write_text(text, encoding="utf-8")
            write_json(folder / REPORT, facts(sections, lacking))
        for shown in (shown for section in sections for shown in section.shown):
            log(logger, shown.figure, out)
        logger.artifact("report", "report", out)
    finally:
        logger.finish()
    return sections, lacking


def searched(run: Any) -> list[Path]:
    """`cfg.run`: a folder, several, or null."""
    if run is None:
        return [Path(name) for name in DEFAULT if Path(name).is_dir()]
    return [Path(folder) for folder in ([run] if isinstance(run, str) else run)]


def build(
    artifacts: Artifacts, packages: Sequence[str], folder: Path
) -> tuple[list[Section], list[Lack]]:
    """Draw the figures of `packages` into `folder`. Return what there is, by section, and what is
    lacking altogether."""
    sections: dict[str, list[Shown]] = {}
    lacking, taken = list[Lack](), set[str]()
    listed = [(*one, builders(one.entry, artifacts)) for one in figure_registry(packages)]
    with tqdm(total=sum(len(each) for *_, each in listed), desc="report", unit="figure") as bar:
        for section, entry, each in listed:
            needs, found = dict[str, None](), list[Shown]()
            for builder in each:
                try:
                    found.append(drawn(unique(built(builder), taken), folder))
                except Missing as missing:
                    needs[str(missing)] = None
                bar.update()
            sections.setdefault(section, []).extend(found)
            if not found:
                lacking.append(Lack(entry.title, "; ".join(needs)))
    return [Section(title, shown) for title, shown in sections.items() if shown], lacking


def built(builder: Builder) -> Figure:
    """Errors of a shard, say, are under the key of the programs that read nothing else."""
    try:
        return builder()
    except UserError as error:
        raise UserError(f"run: {str(error).partition(': ')[2]}") from error


def unique(figure: Figure, taken: set[str]) -> Figure:
    """With a name that files can have, and another where there is one of that name: two runs may be
    called the same."""
    own = file_name(figure.name)
    numbered = (own if number == 1 else f"{own}-{number}" for number in range(1, len(taken) + 2))
    name = next(name for name in numbered if name not in taken)
    taken.add(name)
    return replace(figure, name=name)


def drawn(figure: Figure, folder: Path) -> Shown:
    images = [path for path in save(figure, folder) if path.suffix == ".png"]
    return Shown(figure, images[0].read_bytes() if images else None)


def facts(sections: Sequence[Section], lacking: Sequence[Lack]) -> dict[str, Any]:
    """What report.json says."""
    listed = ("name", "title", "source", "kind", "n", "interval", "how_to_read")
    figures = [
        {"section": section.title, **{key: getattr(shown.figure, key) for key in listed}}
        for section in sections
        for shown in section.shown
    ]
    return {
        "command": command_line(),
        "date": time.strftime("%Y-%m-%d"),
        "version": version("draftpredict"),
        "figures": figures,
        "not_in_this_report": [lack._asdict() for lack in lacking],
    }


def log(logger: Any, figure: Figure, folder: Path) -> None:
    """The picture and the values, as the page has them."""
    image = folder / f"{figure.name}.png"
    if image.is_file():
        logger.image(f"figures/{figure.name}", image, f"{figure.title}. {figure.caption}")
    logger.table(f"tables/{figure.name}", figure.columns, figure.rows)
