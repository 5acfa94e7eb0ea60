"""The decision table: its file format, its checks and its look-up. How the cells were decided is not known here.

The file is JSON with sorted keys and no timestamps: same inputs, same bytes. ``content_hash`` covers everything else.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from ppd_bench.core.errors import NoEvidence, TableError, WrongDomain
from ppd_bench.core.point import content_hash
from ppd_bench.core.topology import Topology
from ppd_bench.policy.axes import Axes

if TYPE_CHECKING:
    from pydantic import TypeAdapter

# History. A new minor version only adds keys, which older readers ignore; any other change is a new major version.
# 1.0 (2026-11-29): first version.
# 1.1 (2026-11-30): rules.min_repeats; of cells: certainty, n_repeats, score_interval, standard errors and their correlation.
#     The intervals and the probability, which were always null, may have values.
SCHEMA_VERSION = "1.1"

NEAR_FACTOR = 4
"""How far from a cell's own lengths, and from the highest rate, a request still counts as seen."""

Side = Literal["pd", "local"]
Evidence = Literal["measured", "simulated", "extrapolated", "insufficient"]
Rule = Literal["equation1", "x0_failed", "x1_failed", "both_failed", "undefined", "unvisited"]
Certainty = Literal["decided", "tie", "success_unclear", "no_interval"]
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """What the table is valid for. ``layout`` is shared by both arms; any topology of that layout may use the table.

    ``baseline`` is the x=0 arm, ``candidate`` the x=1 arm; ``executor`` is ``measured`` or ``simulated``.
    """

    model: str
    gpu: str
    layout: str
    baseline: str
    candidate: str
    executor: Literal["measured", "simulated"]
    engine_version: str
    kv_connector: str
    handoff: str
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Operator weights of Equation 1."""

    w_ttft: float
    w_tpot: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How cells were judged: the success ratio a side needs, the answer where evidence is insufficient or the sides tie,
    the share of visited cells that may be insufficient before a start is refused, and the repeats that an interval needs
    (null in tables of before there were intervals)."""

    success_bound: float
    fallback: Side
    max_unknown_ratio: float
    min_repeats: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell: what was seen of both arms, and what follows.

    ``key`` is ``context/type/qps``. Means are over ok turn-2+ turns, seconds; null where undefined. ``score`` is S of
    Equation 1, null where it was not needed or not defined. ``workloads`` names the grid's workloads behind the cell;
    empty when the grid does not visit it. ``borrowed_from`` is the cell whose figures an unvisited cell shows.

    ``certainty`` is null where evidence is insufficient. Else:

    - ``decided``: the sign of S is certain beside all others of the table, or the side that failed surely failed.
    - ``tie``: the sign of S is not certain; ``decision`` is the fallback.
    - ``success_unclear``: the success ratio of a side cannot be told from the bound.
    - ``no_interval``: too few repeats (``n_repeats``) to say; the decision is what the means alone say.

    Intervals (low, high) hold 95 % each, by themselves. ``probability`` is P(S > 0). Both are null below
    ``rules.min_repeats``. The standard errors over repeats and the correlation of the two deltas' errors are what intervals
    under other weights are made of.
    """

    key: str
    context: str
    type: str
    qps: float
    workloads: tuple[str, ...]
    decision: Side
    evidence: Evidence
    rule: Rule
    score: float | None
    delta_ttft: float | None
    delta_tpot: float | None
    ttft_x0_s: float | None
    ttft_x1_s: float | None
    tpot_x0_s: float | None
    tpot_x1_s: float | None
    success_x0_ratio: float | None
    success_x1_ratio: float | None
    n_pairs: int
    borrowed_from: str | None = None
    delta_ttft_interval: Interval | None = None
    delta_tpot_interval: Interval | None = None
    score_interval: Interval | None = None
    probability: float | None = None
    certainty: Certainty | None = None
    n_repeats: int = 0
    delta_ttft_se: float | None = None
    delta_tpot_se: float | None = None
    delta_correlation: float | None = None
    success_x0_se: float | None = None
    success_x1_se: float | None = None

    @property
    def visited(self) -> bool:
        """Whether a point of the grid stands behind this cell."""
        return bool(self.workloads)


def cell_key(context: str, type_name: str, qps: float) -> str:
    """The name of a cell, as decisions quote it: ``large/tiny/8``."""
    return f"{context}/{type_name}/{qps:g}"


@dataclass(frozen=True, kw_only=True)
class DecisionTable:
    """A complete table. ``cells`` is dense: context-major, then type, then QPS, in the order of the axes.

    ``content_hash`` is empty until the table has been through ``to_json`` and ``from_json``.
    """

    domain: Domain
    axes: Axes
    weights: Weights
    rules: Rules
    inputs_hash: str
    cells: tuple[Cell, ...]
    schema_version: str = SCHEMA_VERSION
    content_hash: str = ""

    @classmethod
    def from_json(cls, text: str) -> DecisionTable:
        """Read a table file's text.

        Raises:
            WrongDomain: the file has another major schema version.
            TableError: the text is damaged or incomplete; every problem that could be found, in one message.
        """
        content = _parsed(text)
        _check_schema(content)
        _check_hash(content)
        table = _validated(text)
        problems = table.axes.problems() or _cell_problems(table)
        if problems:
            raise TableError(_damaged(problems))
        return table

    def to_json(self) -> str:
        """The file's text; the inverse of ``from_json``."""
        content = dataclasses.asdict(self)
        del content["content_hash"]
        content["content_hash"] = content_hash(content)
        return json.dumps(content, sort_keys=True, indent=1, allow_nan=False) + "\n"

    @cached_property
    def _type_index(self) -> Callable[[int, int], int]:
        # Workloads repeat their lengths; remembering them makes the look-up three table reads.
        return lru_cache(maxsize=4096)(self.axes.type_index)

    def lookup(self, *, context_tokens: int, input_tokens: int, output_tokens: int, qps: float) -> Cell:
        """The cell of a request: history, new input and expected output in tokens, conversations per second.

        Total: every query has a cell, and the cell says on what evidence it answers (I10).
        """
        axes = self.axes
        row = axes.context_index(context_tokens) * len(axes.types) + self._type_index(input_tokens, output_tokens)
        return self.cells[row * len(axes.qps) + axes.qps_index(qps)]

    def covers(self, *, context_tokens: int, input_tokens: int, output_tokens: int, qps: float) -> bool:
        """Whether a request is near anything that was measured; else its cell's answer is carried over from afar.

        Near means: a context class that the grid visits, lengths within a factor of ``NEAR_FACTOR`` of the cell's type, and a
        rate between zero and ``NEAR_FACTOR`` times the highest level.
        """
        cell = self.lookup(
            context_tokens=context_tokens, input_tokens=input_tokens, output_tokens=output_tokens, qps=qps
        )
        kind = next(t for t in self.axes.types if t.name == cell.type)
        lengths = ((input_tokens, kind.input_tokens), (output_tokens, kind.output_tokens))
        return (
            cell.visited
            and context_tokens >= 0
            and 0.0 <= qps <= NEAR_FACTOR * max(self.axes.qps)
            and all(typical <= NEAR_FACTOR * n and n <= NEAR_FACTOR * typical for n, typical in lengths)
        )

    def reason(self, cell: Cell) -> str:
        """What a decision says of itself (B29, B31): table hash, cell, evidence, rule, and ``tie`` where it is one."""
        told = f"table {self.content_hash} {cell.key} {cell.evidence} {cell.rule}"
        return f"{told} tie" if cell.certainty == "tie" else told

    @property
    def unknown_ratio(self) -> float:
        """Share of the visited cells whose evidence is insufficient; 1 when the grid visited none."""
        visited = [c for c in self.cells if c.visited]
        return sum(c.evidence == "insufficient" for c in visited) / len(visited) if visited else 1.0

    def check_domain(self, *, topology: Topology, model: str, gpu: str) -> None:
        """Refuse use outside the domain.

        Raises:
            WrongDomain: every difference between the table's domain and the arguments.
        """
        wanted = {"layout": topology.layout.name, "model": model, "gpu": gpu}
        made_for = {"layout": self.domain.layout, "model": self.domain.model, "gpu": self.domain.gpu}
        wrong = [f"{k} {made_for[k]!r}, not {wanted[k]!r}" for k in wanted if made_for[k] != wanted[k]]
        if wrong:
            raise WrongDomain(
                f"decision table {self.content_hash} was made for {'; '.join(wrong)}. "
                f"Build one from a sweep of {topology.layout.name} and {topology.all_local.name} on that model and GPU."
            )

    def check_evidence(self, max_unknown_ratio: float | None = None) -> None:
        """Refuse a table that knows too little; without an argument the table's own bound counts.

        Raises:
            NoEvidence: the share of visited cells that are insufficient is above the bound.
        """
        bound = self.rules.max_unknown_ratio if max_unknown_ratio is None else max_unknown_ratio
        if self.unknown_ratio > bound:
            unknown = [c.key for c in self.cells if c.visited and c.evidence == "insufficient"]
            raise NoEvidence(
                f"decision table {self.content_hash}: {self.unknown_ratio:.0%} of the cells that the sweep visited "
                f"have insufficient evidence, more than the allowed {bound:.0%} ({len(unknown)} cells, first: "
                f"{', '.join(unknown[:5]) or 'none visited'}). Run the missing points, or allow more unknown cells."
            )


def _damaged(problems: list[str]) -> str:
    return "decision table is damaged or incomplete; build it again with build-table:\n" + "\n".join(problems)


def _parsed(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TableError(_damaged([f"not JSON: {error}"])) from error
    if not isinstance(content, dict):
        raise TableError(_damaged([f"a JSON object is needed, found {type(content).__name__}"]))
    return content


def _check_schema(content: dict[str, Any]) -> None:
    version = content.get("schema_version")
    if not isinstance(version, str):
        raise TableError(_damaged([f"schema_version must be text like {SCHEMA_VERSION!r}, found {version!r}"]))
    if version.split(".")[0] != SCHEMA_VERSION.split(".")[0]:
        raise WrongDomain(
            f"decision table has schema version {version}, this program reads {SCHEMA_VERSION.split('.')[0]}.x: "
            "build the table again with this program's build-table"
        )


def _check_hash(content: dict[str, Any]) -> None:
    body = {key: value for key, value in content.items() if key != "content_hash"}
    try:
        found = content_hash(body)
    except ValueError as error:
        raise TableError(_damaged([f"a number is NaN or infinite: {error}"])) from error
    if found != content.get("content_hash"):
        raise TableError(
            _damaged([f"content_hash is {content.get('content_hash')!r} but the content hashes to {found!r}"])
        )


@cache
def _adapter() -> TypeAdapter[DecisionTable]:
    from pydantic import TypeAdapter  # here, because only programs that load a table should pay for it

    return TypeAdapter(DecisionTable)


def _validated(text: str) -> DecisionTable:
    from pydantic import ValidationError

    try:
        return _adapter().validate_json(text, strict=True)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise TableError(_damaged(lines[:20] + ([f"and {len(lines) - 20} more"] if len(lines) > 20 else []))) from error


def _cell_problems(table: DecisionTable) -> list[str]:
    axes = table.axes
    places = [(c.name, t.name, q) for c, t, q in product(axes.contexts, axes.types, axes.qps)]
    if len(places) != len(table.cells):
        return [f"cells: the axes have {len(places)} places, the file has {len(table.cells)} cells"]
    found = [(c.context, c.type, c.qps) for c in table.cells]
    return [
        f"cells.{i}: expected {cell_key(*place)}, found {cell_key(*have)}"
        for i, (place, have) in enumerate(zip(places, found, strict=True))
        if place != have or table.cells[i].key != cell_key(*place)
    ][:20]
