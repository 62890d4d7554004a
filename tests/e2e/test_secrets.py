"""What is secret is in nothing that is written: a planted one is looked for everywhere."""

import subprocess
from pathlib import Path

import pytest

import train
from scripts import evaluate, gen_data, report
from tests.helpers.data.answer_stub import stub_server
from tests.helpers.programs.programs import SPLITS, base, refused, run, write_prompts
from tests.helpers.training.wandb_runs import read_run

SECRET = "Pl4ntedS3cret"
OF_MACHINE = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY")


@pytest.fixture(autouse=True)
def place(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, and a repository whose remote has a password."""
    write_prompts(20)
    subprocess.run(["git", "init", "-q"], check=True)
    remote = f"https://me:{SECRET}@example.org/x.git"
    subprocess.run(["git", "remote", "add", "origin", remote], check=True)
    for name in OF_MACHINE:
        monkeypatch.setenv(name, SECRET.ljust(40, "0"))
    monkeypatch.setenv("WANDB_MODE", "offline")


def holding_the_secret() -> list[Path]:
    written = (path for path in Path().rglob("*") if ".git" not in path.parts)
    return [
        path
        for path in written
        if SECRET in str(path) or (path.is_file() and SECRET.encode() in path.read_bytes())
    ]


@pytest.mark.parametrize(
    "form", ['"http://x/v1?api_key={}"', "http://x/v1?k={}", "http://me:{}@x/v1", "http://x/v1#{}"]
)
@pytest.mark.parametrize("sweep", [False, True])
@pytest.mark.slow
def test_an_address_with_a_secret_is_refused_before_anything_is_written(
    form: str, sweep: bool, tiny_pair_dir: Path
) -> None:
    asked = ["responses=server", "responses.model=m", f"responses.url={form.format(SECRET)}"]
    line = refused(gen_data, *["-m"] * sweep, *base(tiny_pair_dir), *asked, "out=data")
    assert line.startswith("error: responses.url: expected ") and SECRET not in line
    assert holding_the_secret() == [] and not Path("outputs").exists()


@pytest.mark.slow
def test_no_secret_of_the_environment_is_written(
    tiny_pair_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a harvest of answers that a server gives to a key, with failures, to the report."""
    monkeypatch.setenv("TINY_KEY", SECRET)

    def behave(text: str, attempt: int) -> str:
        return "ok" if attempt else "429"  # which shows the key it was given

    with stub_server(behave) as stub:
        asked = [
            *("responses=server", "responses.model=m", f"responses.url={stub.url}"),
            *("responses.key_variable=TINY_KEY", "max_new_tokens=12", "gamma=3", *SPLITS),
        ]
        into = ("out=data/toy", "logger.folder=logged/harvest")
        harvest = [*base(tiny_pair_dir), *asked, "anchors.stride=1", *into]
        monkeypatch.setattr("data_gen.responses.server.PAUSE", 0.0)
        stub.behave = lambda text, attempt: "401"
        line = refused(gen_data, *harvest)
        assert SECRET not in line and "***" in line
        stub.behave = behave
        run(gen_data, *harvest)
        assert f"Bearer {SECRET}" in stub.keys
    quick = ("trainer.epochs=1", "out=checkpoints/toy", "logger.folder=logged/train")
    run(train, "predictor=specdecpp", "data=data/toy", *quick)
    methods = ("methods=[specdecpp]", "method.specdecpp.stop.checkpoint=checkpoints/toy")
    small = ("max_new_tokens=6", "limit=1", "repeats=1", "thresholds=null", *SPLITS)
    into = ("out=runs/toy", "logger.folder=logged/evaluate")
    run(evaluate, *base(tiny_pair_dir), *methods, *small, *into)
    run(report, "logger.folder=logged/report", "out=report")
    for job in ("harvest", "train", "evaluate", "report"):
        assert read_run(Path("logged") / job).history is not None
    assert len([*Path().rglob("*.wandb")]) == 4
    out = capsys.readouterr()
    assert SECRET not in out.out + out.err
    assert holding_the_secret() == []
