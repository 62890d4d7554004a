"""scripts/report.py from its command line: harvest, train, tune, evaluate, report, on a tiny
pair."""

import csv
import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import quote

import pytest
from markupsafe import escape

import train
from reports.figures import speed
from runtime.files import only_writer
from scripts import evaluate, gen_data, report, tune
from tests.helpers.programs.processes import end, forked, wait_for
from tests.helpers.programs.programs import SPLITS, base, odd_and_even, refused, run, write_prompts
from tests.helpers.reports.browser import REMEDY, executable, launched, opened
from tests.helpers.training.wandb_runs import read_run

SMALL = ("max_new_tokens=12", "gamma=5", "anchors.stride=1", "out=data/toy", *SPLITS)
QUICK = ("data=data/toy", "trainer.epochs=2", "trainer.lr=0.01")
FEW = ("split=test", "limit=3", "repeats=2", "max_new_tokens=12", "tried.fixed.stop.gamma=[2]")
GENERAL = ("figures=[reports.figures]", "logger=none")
METHODS = "methods=[autoregressive,fixed,confidence,product,value,specdecpp,hrad]"


@pytest.fixture(scope="module")
def made(tiny_pair_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which everything has been run once, training and report logged to W&B."""
    folder = tmp_path_factory.mktemp("reported")
    pair = [*base(tiny_pair_dir), "pair.name=org/mine"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("WANDB_MODE", "offline")
        write_prompts(odd_and_even(24))
        run(gen_data, *pair, *SMALL)
        run(train, "predictor=specdecpp", *QUICK, "logger.folder=logs/train")
        for name in ("hrad", "value"):
            run(train, f"predictor={name}", *QUICK, "logger=none")
        costs = ("cost=c4", "points=5", "out=runs/thresholds.json")
        run(tune, *pair, "data=data/toy", *costs, *SPLITS)
        run(evaluate, *pair, *FEW, METHODS, "logger=none", "out=runs/x", *SPLITS)
        run(report, "logger.folder=logs/report")
    return folder


@pytest.fixture
def facts(made: Path) -> Any:
    return json.loads((made / "runs/report/report.json").read_text())


@pytest.mark.smoke
@pytest.mark.slow
def test_every_figure_has_its_files_and_says_what_it_rests_on(made: Path, facts: Any) -> None:
    out = made / "runs/report"
    names = {figure["name"] for figure in facts["figures"]}
    assert {"speedups", "time-shares", "accepted-lengths"} <= names
    assert {"specdecpp-speed", "specdecpp-times"} <= names and len(names) == len(facts["figures"])
    for figure in facts["figures"]:
        assert figure["kind"] in ("measured", "modelled", "exact")
        words = ("title", "source", "n", "interval", "how_to_read", "section")
        assert all(figure[key] for key in words)
        with (out / f"{figure['name']}.csv").open(newline="") as lines:
            header, *rows = csv.reader(lines)
        assert rows and {len(row) for row in rows} == {len(header)}
    assert {path.stem for path in out.glob("*.csv")} == names
    assert {path.stem for path in out.glob("*.png")} <= names and list(out.glob("*.png"))


def test_a_pair_may_have_a_slash_in_its_name(facts: Any) -> None:
    """As names of the Hugging Face hub do: in names of files it is %2F."""
    names = [figure["name"] for figure in facts["figures"]]
    assert [name for name in names if name.startswith("tuned-org%2Fmine")]


@pytest.mark.smoke
def test_the_page_holds_all_and_fetches_nothing(made: Path, facts: Any) -> None:
    page = (made / "runs/report/index.html").read_text()
    for figure in facts["figures"]:
        assert f'id="{figure["name"]}"' in page
        assert f'href="{quote(figure["name"])}.csv"' in page
    pictures = list((made / "runs/report").glob("*.png"))
    assert page.count("data:image/png;base64,") == len(pictures)
    links = r"""(?:src|href)\s*=\s*["']?\s*(?:\w+:)?//"""
    assert not re.search(links, page) and "@import" not in page
    heads = ("checkpoints/specdecpp", "checkpoints/hrad")
    for place in ("runs/x", "data/toy", *heads, "runs/thresholds.json"):
        assert f"<code>{place}</code>" in page, "it says what it is made from"
    # the trace viewer, with the texts of tokens
    assert 'id="viewer-slider"' in page and "w3" in page
    for lack in facts["not_in_this_report"]:
        assert all(str(escape(text)) in page for text in lack.values())


@pytest.mark.skipif(executable() is None, reason=REMEDY)
@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 360)])
def test_the_page_opens_from_disk_without_a_complaint(made: Path, scheme: str, width: int) -> None:
    """In a browser: no message, no error, no request but for files and data; pictures, links and
    the viewer work."""
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}}
    index = made / "runs/report/index.html"
    with launched() as browser, opened(browser, index, **options) as page:
        shown = page.evaluate("[...document.images].filter((one) => one.naturalWidth > 0).length")
        assert shown == len(list((made / "runs/report").glob("*.png"))) > 0
        assert page.evaluate("document.scrollingElement.scrollWidth") <= width
        there = "link => document.getElementById(decodeURIComponent(link.hash.slice(1)))"
        assert page.evaluate(f"[...document.querySelectorAll('nav a')].every({there})")
        page.focus("#viewer")
        page.keyboard.press("ArrowRight")
        assert page.input_value("#viewer-slider") == "2"
        assert page.inner_text("#viewer-summary").startswith("Round 2 of")


@pytest.mark.smoke
def test_weights_and_biases_has_config_curves_tables_and_pictures(made: Path, facts: Any) -> None:
    trained, reported = (read_run(made / "logs" / name) for name in ("train", "report"))
    assert trained.config["trainer"]["epochs"] == 2
    curves = json.loads((made / "checkpoints/specdecpp/metrics.json").read_text())["history"]
    logged = [
        {key: step[f"train/{key}"] for key in row}
        for row, step in zip(curves, trained.history, strict=False)
    ]
    assert logged == curves and len(curves) == 2
    assert reported.config["out"] == "runs/report"
    for figure in facts["figures"]:
        name = figure["name"]
        logged = json.loads(reported.file(reported.summary[f"tables/{name}"]).read_text())
        with (made / f"runs/report/{name}.csv").open(newline="") as lines:
            header, *rows = csv.reader(lines)
        assert logged["columns"] == header and len(logged["data"]) == len(rows)
    for picture in (made / "runs/report").glob("*.png"):
        logged = reported.summary[f"figures/{picture.stem}"]
        assert reported.file(logged).read_bytes() == picture.read_bytes() and logged["caption"]


@pytest.mark.slow
def test_a_report_of_one_harvest_says_what_it_lacks(made: Path, here: Path) -> None:
    printed = run(report, f"run={made / 'data'}", *GENERAL)
    facts = json.loads(Path("runs/report/report.json").read_text())
    lacking = {lack["title"]: lack["needs"] for lack in facts["not_in_this_report"]}
    assert "python scripts/evaluate.py" in lacking["Speed-up"]
    assert f"{len(lacking)} more need other runs" in printed


@pytest.mark.slow
def test_a_report_replaces_reports_and_nothing_else(made: Path, here: Path) -> None:
    arguments = (f"run=[{made / 'runs'}]", *GENERAL, "out=here")
    run(report, *arguments)
    Path("here/stale.png").touch()
    run(report, *arguments)
    assert not Path("here/stale.png").exists()
    Path("here/report.json").unlink()
    assert "out: here holds something else" in refused(report, *arguments)


@pytest.mark.slow
def test_two_reports_do_not_write_one_folder(made: Path, here: Path) -> None:
    arguments = (f"run={made / 'runs'}", *GENERAL, "out=here")

    def hold() -> None:
        with only_writer(Path("here")):
            Path("begun").touch()
            time.sleep(60)

    child = forked(hold)
    wait_for(here, "begun")
    assert "out: another process is making here. Wait for it" in refused(report, *arguments)
    end(child)
    run(report, *arguments)
    assert Path("here/report.json").is_file() and not list(Path().glob(".*"))


@pytest.mark.slow
def test_what_is_left_alone_is_named(made: Path, here: Path) -> None:
    """And what is found twice is read once."""
    for name in ("first", "second"):
        shutil.copytree(made / "runs/x", f"{name}/x")
    shutil.copytree(made / "data/toy", "first/begun")
    Path("first/begun/manifest.json").unlink()
    Path("first/notes.json").write_text('{"mine": 1}')
    Path("second/round").symlink_to("..")
    for name in ("former", "older"):
        shutil.copytree(made / "runs/x", f"first/{name}")
    results = json.loads(Path("first/former/results.json").read_text())
    older = {**results, "run": None}
    Path("first/older/results.json").write_text(json.dumps(older))
    del results["tried"]
    Path("first/former/results.json").write_text(json.dumps(results))
    run(report, "run=[first,second,first]", *GENERAL)
    page = Path("runs/report/index.html").read_text()
    for left in ("notes.json", "begun/plan.json", "former/results.json", "older/results.json"):
        assert f"first/{left}" in page
    assert page.count("<code>first/x</code>") == 1
    shutil.copytree("first/former", "alone/former")
    message = refused(report, "run=alone", "logger=none")
    assert "got none (alone/former/results.json: not written by this version of" in message


def test_a_bug_in_a_figure_is_not_hidden(
    made: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what is missing is."""
    monkeypatch.setattr(speed, "speedups", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        run(report, f"run={made / 'runs'}", "logger=none")
    assert not Path("runs").exists() or not list(Path("runs").iterdir())


def test_no_changed_digit_of_an_evaluation_is_reported(made: Path, here: Path) -> None:
    """Nor a trace that is gone, nor one more."""
    traces = "traces-specdecpp.jsonl"

    def changed(name: str, change: Callable[[bytes], bytes]) -> str:
        shutil.rmtree("runs", ignore_errors=True)
        shutil.copytree(made / "runs/x", "runs/x")
        path = Path("runs/x", name)
        path.write_bytes(change(path.read_bytes()))
        return refused(report, "run=runs", "logger=none")

    for name in ("results.json", "vocabulary.json", traces):
        for pattern in (rb"[1-8](?=[,}\]])", rb"[1-8](?=\d*[,}\]])", rb"(?<=\.)\d"):
            more = lambda content: re.sub(  # noqa: E731
                pattern, lambda found: b"9" if found[0] != b"9" else b"7", content, count=1
            )
            if re.search(pattern, Path(made, "runs/x", name).read_bytes()):
                message = changed(name, more)
                assert message.startswith("error: run: runs/x/" + name), message
    for change in (
        lambda content: content[content.index(b"\n") + 1 :],
        lambda content: content + content[: content.index(b"\n") + 1],
    ):
        assert "run: runs/x has not all traces of specdecpp" in changed(traces, change)
