import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf.errors import ConfigAttributeError

from runtime.cli import explain
from runtime.errors import UserError

SCRIPT = """
'''Does the job.'''
from typing import Annotated
from runtime.cli import program
from runtime.settings.kinds import Count, Group, Text

class Pair(Group):
    target: Text

class Settings(Group):
    pair: Pair
    do: Annotated[Text, "what is done"]
    times: Count

@program(__file__, Settings)
def main(settings):
    import body

    body.main(settings)

if __name__ == "__main__":
    main()
"""
BODY = """
from runtime.errors import UserError

def main(cfg) -> None:
    if cfg.do == "bad":
        raise UserError("do: cannot be 'bad'.\\nUse do=good")
    if cfg.do == "bug":
        raise ValueError("a bug")
    if cfg.do == "full":
        raise OSError(28, "No space left on device", "out.bin")
    if cfg.do == "read-only":
        raise OSError(30, "Read-only file system", "out.bin")
    if cfg.do == "interrupt":
        raise KeyboardInterrupt
    print("done", cfg.do)
"""


INDEXING = "class Rule:\n    def __init__(self, x):\n        x[0]"
READ_ONLY = "error: [Errno 30] Read-only file system: 'out.bin'"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "conf" / "pair").mkdir(parents=True)
    (tmp_path / "conf" / "pair" / "toy.yaml").write_text("target: x\n")
    job = "defaults: [{pair: toy}, _self_]\ndo: ???\ntimes: 1\n"
    (tmp_path / "conf" / "job.yaml").write_text(job)
    (tmp_path / "scripts").mkdir()
    path = tmp_path / "scripts" / "job.py"
    path.write_text(SCRIPT)
    (tmp_path / "scripts" / "body.py").write_text(BODY)
    return path


def run(script: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *overrides]
    return subprocess.run(command, capture_output=True, text=True, cwd=script.parents[1])


@pytest.mark.parametrize(
    ("override", "code", "says"),
    [
        ("do=good", 0, ""),
        ("times=2", 2, "error: do: no value given. Add do=..."),
        ("do=bad", 2, "error: do: cannot be 'bad'. Use do=good"),
        ("do=full", 2, "error: [Errno 28] No space left on device: 'out.bin'. Free some space"),
        ("do=read-only", 2, f"{READ_ONLY}. Make it writable, or choose another folder"),
        ("do=interrupt", 130, "error: interrupted. Run the same command again: jobs that save as"),
        ("pair.unknown=1", 2, "error: Could not override 'pair.unknown'"),
        ("pair=nope", 2, "error: In 'job': Could not find 'pair/nope' Available options in"),
    ],
)
@pytest.mark.few(3, rest="slow")
def test_exit_code_and_one_line(script, override, code, says):
    done = run(script, override)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(says)
    assert done.stderr.count("\n") == (1 if code else 0)


@pytest.mark.parametrize("told", ["--help", "--cfg job", "do=good", "do=bad", "-m do=good,fine"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.slow
def test_output_that_nobody_reads_ends_silently(script, told, unbuffered):
    """As `| head` does, here before the first line: stdout is a pipe, and stderr but for a sweep,
    of which nothing is to be seen there."""
    reader, writer = os.pipe()
    os.close(reader)
    ready = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    stderr = subprocess.PIPE if "-m" in told else writer
    command = [sys.executable, str(script), *told.split()]
    done = subprocess.run(command, stdout=writer, stderr=stderr, env=ready)
    os.close(writer)
    assert done.returncode == 141 and not done.stderr


@pytest.mark.slow
def test_a_closed_output_is_no_fault(script):
    command = f'exec "{sys.executable}" "{script}" do=good >&-'
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_another_broken_pipe_is_a_bug(script):
    body = script.with_name("body.py")
    body.write_text("def main(cfg):\n    raise BrokenPipeError('of a socket')\n")
    done = run(script, "do=good")
    assert done.returncode == 1 and "BrokenPipeError: of a socket" in done.stderr


@pytest.mark.parametrize(
    "terminal",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
)
@pytest.mark.slow
def test_a_terminal_without_the_characters_gets_escapes(script, terminal):
    script.write_text(SCRIPT.replace("what is done", "what is done — ≥ 1"), encoding="utf-8")
    script.with_name("body.py").write_text('def main(cfg):\n    print("caf\\u00e9 1.3×")\n')
    for argument, printed in (("--help", r"done \u2014 \u2265 1"), ("do=x", r"caf\xe9 1.3\xd7")):
        done = subprocess.run(
            [sys.executable, str(script), argument],
            capture_output=True,
            cwd=script.parents[1],
            env={**os.environ, **terminal},
        )
        assert done.returncode == 0 and done.stderr == b"", done.stderr
        assert printed.encode() in done.stdout


def test_a_config_that_is_no_yaml_is_one_line(script):
    (script.parents[1] / "conf" / "pair" / "toy.yaml").write_text("target: [\n")
    done = run(script, "do=good")
    assert done.returncode == 2
    assert "toy.yaml" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_help_starts_with_what_the_script_does(script):
    done = run(script, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Does the job.") and "what is done" in done.stdout


def test_a_bug_keeps_its_traceback_and_a_run_folder_is_made_where_it_is_named(script):
    done = run(script, "do=bug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "a bug" in done.stderr
    assert not (script.parents[1] / "outputs").exists()
    run(script, "do=good", "hydra.run.dir=kept")
    assert (script.parents[1] / "kept/.hydra/config.yaml").is_file()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def f(:", "SyntaxError of plugin.Rule: invalid syntax (plugin.py, line 1). Mend it"),
        ("import no", "ModuleNotFoundError of plugin.Rule: No module named 'no' (PATH line 1)."),
        (INDEXING, "TypeError of plugin.Rule: 'int' object is not subscriptable (PATH line 3)."),
        ("class Rule: pass", "TypeError of plugin.Rule: Rule() takes no arguments. Mend it"),
    ],
)
def test_an_error_in_a_plugin_says_what_it_is_and_where(tmp_path, monkeypatch, code, said):
    (tmp_path / "plugin.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "plugin", raising=False)
    with pytest.raises(InstantiationException) as raised:
        instantiate({"stop": {"_target_": "plugin.Rule", "x": 1}})
    monkeypatch.delitem(sys.modules, "plugin", raising=False)
    message = explain(raised.value)
    said = said.replace("PATH", str(tmp_path / "plugin.py"))
    assert message is not None and message.startswith("stop: expected ") and said in message


@pytest.mark.parametrize(
    ("place", "message", "said"),
    [
        ("draft_warp", "warp.top_k: -3 is negative", "draft_warp.top_k: -3 is negative"),
        ("warp", "warp.top_k: -3 is negative", "warp.top_k: -3 is negative"),
        ("rules.hrad", "stop.checkpoint: none", "rules.hrad.checkpoint: none"),
        ("method.hrad.engine.stop", "stop.checkpoint: none", "method.hrad.stop.checkpoint: none"),
        ("engine.stop", "stop.checkpoint: none", "stop.checkpoint: none"),
        ("method.a.engine.structure", "structure.gamma_max: 0", "method.a.structure.gamma_max: 0"),
        ("structures.a", "structure.checkpoint: none", "structures.a.checkpoint: none"),
        ("method.a.engine.structure.cost", "cost.row: 0", "method.a.structure.cost.row: 0"),
        ("method.custom.engine.structure.cost", "cost.row: 0", "structure.cost.row: 0"),
        ("method.custom.engine", "structure.budget: 0", "structure.budget: 0"),
        ("method.a.engine", "stop.rule: none", "method.a.stop.rule: none"),
        ("what_if.c4", "cost.target: [3, 1]", "what_if.c4.target: [3, 1]"),
        ("cost", "cost.target: [3, 1]", "cost.target: [3, 1]"),
        ("features.hrad", "features.side: no", "features.hrad.side: no"),
        ("trainer", "trainer: epochs must be", "trainer: epochs must be"),
    ],
)
def test_a_key_is_named_as_the_user_sets_it(place, message, said):
    error = InstantiationException(f"Error in call to target 'x':\nUserError()\nfull_key: {place}")
    error.__cause__ = UserError(message)
    assert explain(error) == said


def test_explain_leaves_bugs_alone():
    assert explain(ValueError("x")) is None
    assert explain(OSError(errno.ENOENT, "No such file or directory")) is None
    assert explain(ConfigAttributeError("Key 'x' is not in struct\n    full_key: x")) is not None
