"""Responses from a real server, `transformers serve`, that is killed and started again while it is
asked.

Needs the extra `serve`: pip install --constraint constraints.txt --editable ".[serve]"
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pyarrow.parquet as pq
import pytest

from data_gen.responses.log import NAME
from tests.helpers.models.tiny_pair import save_tiny_pair

ROOT = Path(__file__).resolve().parents[2]
COUNT, WORDS = 200, 31


class Serve:
    """`transformers serve` on one port, as often as it is started."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder, self.log = folder, log
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = int(found.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        program = "from transformers.cli.transformers import main; main()"
        options = ["--host", "127.0.0.1", "--port", str(self.port)]
        options += ["--device", "cpu", "--dtype", "float32"]
        with self.log.open("ab") as log:
            command = [sys.executable, "-c", program, "serve", str(self.folder), *options]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def wait(self) -> None:
        assert self.process is not None
        for _ in range(240):
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            try:
                if httpx.get(self.url.replace("/v1", "/health")).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.5)
        raise AssertionError("the server does not start")

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    save_tiny_pair(tmp_path / "pair")
    served = Serve(tmp_path / "pair" / "target", tmp_path / "serve.log")
    served.start()
    yield served
    served.kill()


@pytest.mark.slow
def test_every_prompt_is_answered_once_though_the_server_is_killed(
    serve: Serve, tmp_path: Path
) -> None:
    texts = [f"w{n % WORDS + 1} w{n // WORDS + 1} w{n % 7 + 1}" for n in range(COUNT)]
    prompts = [json.dumps({"id": f"p{n}", "prompt": text}) for n, text in enumerate(texts)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts))
    sampling = json.dumps({"do_sample": True, "top_k": 0}).replace('"', r"\"")
    command = [
        *(sys.executable, str(ROOT / "scripts" / "gen_data.py"), "out=data", "batch_size=64"),
        *("pair.name=tiny", "pair.target=pair/target", "pair.draft=pair/draft"),
        *("max_new_tokens=12", "gamma=3"),
        *("dataset=jsonl", "dataset.path=prompts.jsonl", "dataset.chat=false", "responses=server"),
        *(f"responses.url={serve.url}", f"responses.model={serve.folder}", "responses.timeout=60"),
        f'+responses.extra.generation_config="{sampling}"',
    ]
    serve.wait()
    start = time.perf_counter()
    with (tmp_path / "harvest.log").open("wb") as log:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        harvest = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, env=environment)
    log_file = tmp_path / "data" / NAME

    def answered() -> int:
        return log_file.read_bytes().count(b"\n") if log_file.exists() else 0

    while answered() < COUNT // 3:
        assert harvest.poll() is None, (tmp_path / "harvest.log").read_text()[-2000:]
        time.sleep(0.1)
    serve.kill()
    killed_at = answered()
    time.sleep(5)
    assert harvest.poll() is None, "it waits for the server"
    assert killed_at <= answered() < COUNT
    serve.start()
    assert harvest.wait(timeout=1500) == 0, (tmp_path / "harvest.log").read_text()[-2000:]
    names = [json.loads(line)["id"] for line in log_file.read_text().splitlines()]
    assert sorted(names) == sorted(f"p{n}" for n in range(COUNT)), "each once"
    shards = (tmp_path / "data").glob("responses-*.parquet")
    harvested = [name for path in shards for name in pq.read_table(path)["prompt_id"].to_pylist()]
    assert sorted(harvested) == sorted(names)
    replies = re.findall(r'"POST /v1/completions HTTP/1.1" (\d+)', serve.log.read_text())
    print(
        f"{COUNT} prompts, killed after {killed_at} answers, {len(replies)} replies logged by both"
        f" servers ({sorted(set(replies))}), {time.perf_counter() - start:.0f} s with the harvest"
    )
