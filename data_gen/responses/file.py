"""External responses from a JSONL file: one object a line."""

import pathlib
from collections.abc import Sequence
from typing import Annotated

from data_gen.prompts import Prompt
from data_gen.responses.external import FORM, ExternalResponse, response_from_row
from data_gen.settings import HarvestSettings
from runtime.errors import UserError
from runtime.json_lines import read_objects
from runtime.settings.kinds import Path


class ResponseFile:
    """`path`: one object a line with a prompt's `id` and its `response` (text) or `response_tokens`
    (ids).

    With ``"finish_reason": "stop"`` a response ends with the target's end token. Further fields,
    blank lines, and responses to prompts that are not in the dataset are left alone."""

    external = True

    def __init__(
        self,
        path: Annotated[
            Path,
            'file with {"id": <prompt id>, "response": <text>} or {"id": ..., "response_tokens":'
            ' [...]} a line, and "finish_reason": "stop" where the target ended it',
        ],
    ) -> None:
        self.path = pathlib.Path(path).expanduser()

    def fetch(
        self, prompts: Sequence[Prompt], settings: HarvestSettings, out: pathlib.Path, ask: bool
    ) -> dict[str, ExternalResponse]:
        """Raises UserError naming the line of what is no response, or a prompt that has none or
        two."""
        if not self.path.is_file():
            raise UserError(
                f"responses.path: there is no file {self.path}. Set responses.path=<a JSONL file>"
            )
        found: dict[str, ExternalResponse] = {}
        for at, _, row in read_objects(self.path, "responses.path", FORM):
            where = f"responses.path: {at}"
            response = response_from_row(row, where)
            if first := found.get(response.prompt_id):
                earlier = first.where.rpartition(" ")[2]
                raise UserError(
                    f"{where} answers {response.prompt_id} again (line {earlier} did). Remove one"
                    " of them"
                )
            found[response.prompt_id] = response
        if missing := [prompt.id for prompt in prompts if prompt.id not in found]:
            raise UserError(
                f"responses.path: {self.path} has no response to {missing[0]} ({len(missing)} of"
                f" {len(prompts)} prompts lack one). Add a line with its id, or take it out of the"
                " dataset"
            )
        return found
