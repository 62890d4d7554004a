"""vLLM as a process that answers lines: started with vLLM's own Python, so that its packages and
ours need not agree.

    .vllm/bin/python -m runtime.vllm_worker '{"model": "...", ...}'

The argument holds the arguments of `vllm.LLM`. A line of input is a batch of requests, `prompts`
(token ids) and the fields of `SamplingParams`; a line of output says what came of it, in the
worker's own seconds. What vLLM prints goes to stderr."""

import json
import multiprocessing
import os
import sys
from multiprocessing.connection import wait
from threading import Thread
from time import perf_counter
from typing import Any

COUNTERS = {
    "drafts": "spec_decode_num_drafts",
    "draft_tokens": "spec_decode_num_draft_tokens",
    "accepted_tokens": "spec_decode_num_accepted_tokens",
    "preemptions": "num_preemptions",
}
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"


def main() -> None:
    out, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)  # and what is printed from below

    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(**json.loads(sys.argv[1]), disable_log_stats=False)
    Thread(target=_end_with_the_engine, daemon=True).start()

    def counted() -> dict[str, Any]:
        """Return vLLM's counters so far."""
        found = {metric.name: metric for metric in llm.get_metrics()}
        counts = {
            name: getattr(found.get(f"vllm:{of}"), "value", 0) for name, of in COUNTERS.items()
        }
        places = getattr(found.get(f"vllm:{PER_POSITION}"), "values", [])
        return {name: int(count) for name, count in counts.items()} | {"per_position": places}

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=out, flush=True)

    def decoded(prompts: list[Any], sampling: list[Any], at_once: int) -> list[Any]:
        """Return what vLLM says to each prompt, at most `at_once` of them at a time."""
        engine, found, begun = llm.llm_engine, dict[int, Any](), 0
        if at_once >= engine.vllm_config.scheduler_config.max_num_seqs:  # its own queue is sooner
            at_once = len(prompts)
        try:
            while len(found) < len(prompts):
                while begun < len(prompts) and engine.get_num_unfinished_requests() < at_once:
                    engine.add_request(str(begun), prompts[begun], sampling[begun])
                    begun += 1
                ended = [each for each in engine.step() if each.finished]
                found.update({int(each.request_id): each for each in ended})
        except BaseException:
            engine.abort_request([str(each) for each in range(begun) if each not in found])
            raise
        return [found[number] for number in range(len(prompts))]

    say({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        at_once = asked.pop("at_once") or len(asked["prompts"])
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in asked.pop("prompts")]
        try:
            asked["output_kind"] = RequestOutputKind.FINAL_ONLY
            sampling = [SamplingParams(**{**asked, "seed": seed}) for seed in asked.pop("seeds")]
            before, start = counted(), perf_counter()
            results = decoded(prompts, sampling, at_once)
            seconds = perf_counter() - start
        except Exception as error:  # vLLM's own classes derive from no narrower one
            say({"error": str(error)})
            continue
        after = counted()
        changes: dict[str, Any] = {name: after[name] - before[name] for name in COUNTERS}
        places = after["per_position"]
        earlier = before["per_position"] or [0] * len(places)
        changes["per_position"] = [now - then for now, then in zip(places, earlier, strict=True)]
        say(
            {
                "tokens": [list(result.outputs[0].token_ids) for result in results],
                "reasons": [result.outputs[0].finish_reason for result in results],
                "seconds": seconds,
                **changes,
            }
        )


def _end_with_the_engine() -> None:
    """End this process when one that it has started ends: vLLM would wait for it for ever."""
    if engine := multiprocessing.active_children():
        wait([each.sentinel for each in engine])
        print("RuntimeError: the process of the engine has ended", file=sys.stderr, flush=True)
        os._exit(1)


if __name__ == "__main__":
    main()
