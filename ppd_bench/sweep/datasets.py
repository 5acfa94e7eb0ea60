"""Recorded traffic in ``workloads``: an entry that is a mapping with the key ``dataset``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, Strict, ValidationError

from ppd_bench.core.errors import SpecError
from ppd_bench.core.workload import WorkloadSpec
from ppd_bench.sweep.keys import COUNT, Positive, Text
from ppd_bench.workload.spec import NAME_ALLOWED, NAME_PATTERN
from ppd_bench.workload.strict_model import Origin, StrictKeys, problems_of
from ppd_bench.workload.traffic import SourceFile


def _key(allowed: str, default: Any = None) -> Any:
    return Field(default=default, description=allowed)


class DatasetKeys(StrictKeys):
    """One entry; null leaves a key to the format.

    ``arrivals: poisson``, the default: whole conversations are drawn, at each of the sweep's QPS. ``recorded``: they arrive as
    they did, ``time_scale`` times as fast, and the sweep's QPS mean nothing. ``max_request_tokens`` null is the engines'
    max_model_len.
    """

    dataset: Annotated[Text, Field(min_length=1)] = Field(
        description="the path of a trace, a conversation file, or a folder"
    )
    name: Annotated[Text, Field(pattern=NAME_PATTERN)] | None = _key(NAME_ALLOWED)
    format: Text | None = _key("null (detected), or the name of a trace format")
    tokenizer: Text | None = _key("null (an estimate), or the path of a tokenizer.json")
    block_tokens: Positive | None = _key(COUNT)
    sessions: Literal["chain", "none"] = _key("chain, none", "chain")
    loop: Literal["timestamps", "completion"] | None = _key("timestamps, completion")
    arrivals: Literal["poisson", "recorded"] = _key("poisson, recorded", "poisson")
    time_scale: Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)] = _key("a number above 0", 1.0)
    max_request_tokens: Positive | None = _key(COUNT)
    max_requests: Positive | None = _key(COUNT)
    max_inflight_sessions: Positive | None = _key(COUNT)


Dataset = tuple[WorkloadSpec, SourceFile]
OpenDataset = Callable[[DatasetKeys], Dataset]
"""Reads a dataset, for those rooms that know how."""


def keys_of(entry: Mapping[str, Any], max_model_len: int) -> DatasetKeys:
    """The entry, checked.

    Raises:
        SpecError: every problem of it, one line each; the place is the caller's to say.
    """
    try:
        keys = DatasetKeys.model_validate(dict(entry))
    except ValidationError as error:
        lines = problems_of(error, DatasetKeys, Origin(file=""))
        raise SpecError([line.removeprefix(": ") for line in lines]) from error
    return keys if keys.max_request_tokens else keys.model_copy(update={"max_request_tokens": max_model_len})
