"""One workload file, parsed strictly."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, Strict, ValidationError

from ppd_bench.core.errors import SpecError
from ppd_bench.core.workload import TurnLengths, WorkloadSpec
from ppd_bench.workload.strict_model import Origin, StrictKeys, problems_of
from ppd_bench.workload.strict_yaml import read_mapping

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
NAME_ALLOWED = "letters, digits, '.', '_' and '-', starting with a letter or digit"
DEFAULT_MAX_OUTPUT_TOKENS = 2048
"""What clients declare unless a workload says otherwise: far above what they generate, as real clients do."""

Tokens = Annotated[int, Strict(), Field(ge=1)]


class TurnKeys(StrictKeys):
    """One entry of ``turns``."""

    input_tokens: Tokens = Field(description="a whole number of new prompt tokens, 1 or more")
    output_tokens: Tokens = Field(description="a whole number of generated tokens, 1 or more")


def _at_least_one(turns: tuple[TurnKeys, ...]) -> tuple[TurnKeys, ...]:
    """Not ``min_length``, which also complains about a list whose entries are all wrong."""
    if not turns:
        raise ValueError("is empty")
    return turns


class WorkloadKeys(StrictKeys):
    """The keys of a workload file."""

    name: Annotated[str, Strict()] = Field(pattern=NAME_PATTERN, description=NAME_ALLOWED)
    category: Literal["decode_heavy", "balanced", "prefill_heavy"] = Field(
        description="decode_heavy, balanced, prefill_heavy"
    )
    description: Annotated[str, Strict()] = Field(default="", description="text")
    max_output_tokens: Tokens = Field(
        default=DEFAULT_MAX_OUTPUT_TOKENS, description="a whole number, at least the longest output_tokens"
    )
    turns: Annotated[tuple[TurnKeys, ...], AfterValidator(_at_least_one)] = Field(
        description="a list of one or more {input_tokens: N, output_tokens: N}"
    )


def load_workload(text: str, *, file: str) -> WorkloadSpec:
    """Parse the YAML text of a workload; ``file`` is how messages name it.

    Raises:
        SpecError: every problem of the file, one line each.
    """
    data, problems = read_mapping(text, file=file)
    origin = Origin(file=file)
    try:
        keys = WorkloadKeys.model_validate(data)
    except ValidationError as error:
        raise SpecError(problems + problems_of(error, WorkloadKeys, origin)) from error
    problems += [
        origin.line(
            ("turns", index, "output_tokens"),
            f"{turn.output_tokens} is more than max_output_tokens ({keys.max_output_tokens})",
            "at most what clients declare",
        )
        for index, turn in enumerate(keys.turns)
        if turn.output_tokens > keys.max_output_tokens
    ]
    if problems:
        raise SpecError(problems)
    return WorkloadSpec(
        name=keys.name,
        category=keys.category,
        turns=tuple(TurnLengths(input_tokens=t.input_tokens, output_tokens=t.output_tokens) for t in keys.turns),
        max_output_tokens=keys.max_output_tokens,
    )
