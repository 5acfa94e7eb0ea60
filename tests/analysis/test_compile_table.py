import dataclasses
import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppd_bench.analysis.compile_table import compile_table, diff_tables, reweigh
from ppd_bench.analysis.pairing import DELTA_FIELDS
from ppd_bench.core.enums import Executor
from ppd_bench.core.errors import NoEvidence, SpecError
from ppd_bench.core.topology import parse_topology
from ppd_bench.policy.axes import PAPER_AXES
from ppd_bench.policy.table import DecisionTable

PAIR = (parse_topology("1P_3D"), parse_topology("1P_3pD"))
TURN1, TURN2 = ("small", "large"), tuple(t.name for t in PAPER_AXES.types)
# Local halves TTFT and adds 20 % of TPOT: S = 0.5 w_ttft - 0.2 w_tpot.
FIGURES = {
    "ttft_x0_s": 0.2, "ttft_x1_s": 0.1, "tpot_x0_s": 0.010, "tpot_x1_s": 0.012,
    "success_x0_ratio": 1.0, "success_x1_ratio": 1.0, "n_pairs": 7,
}  # fmt: skip


def delta_frame(*rows):
    base = {"baseline": "1P_3D", "candidate": "1P_3pD", "delta_ttft": math.nan, "delta_tpot": math.nan} | FIGURES
    return pd.DataFrame([base | row for row in rows], columns=list(DELTA_FIELDS))


@pytest.fixture(scope="session")
def grid(make_point, make_workload):
    """Both arms of all 18 workloads at all ten QPS levels."""
    return [
        make_point(arm.name, workload=make_workload(t1, t2), qps=qps)
        for arm in PAIR
        for t1 in TURN1
        for t2 in TURN2
        for qps in PAPER_AXES.qps
    ]


@pytest.fixture(scope="session")
def one_cell(make_point):
    """Compile one visited cell (small/tiny/8) from changed figures."""
    points = [make_point(arm.name) for arm in PAIR]

    def compile_one(w_ttft=1.0, w_tpot=1.0, **changes):
        options = {k: changes.pop(k) for k in ("success_bound", "fallback") if k in changes}
        frame = delta_frame({"workload": "small_tiny", "qps": 8.0} | changes)
        return compile_table(frame, points, pair=PAIR, w_ttft=w_ttft, w_tpot=w_tpot, **options)

    return compile_one


def visited(text):
    (cell,) = [c for c in DecisionTable.from_json(text).cells if c.visited]
    return cell


def test_a_cell_keeps_its_figures_and_is_decided_by_equation_1(one_cell):
    cell = visited(one_cell(w_ttft=1, w_tpot=2))
    assert (cell.key, cell.workloads, cell.n_pairs) == ("small/tiny/8", ("small_tiny",), 7)
    assert (cell.delta_ttft, cell.delta_tpot) == (pytest.approx(0.5), pytest.approx(0.2))
    assert (cell.decision, cell.rule, cell.evidence) == ("local", "equation1", "simulated")
    assert cell.score == pytest.approx(0.1)
    assert (cell.ttft_x0_s, cell.tpot_x1_s, cell.success_x0_ratio) == (0.2, 0.012, 1.0)
    assert (cell.delta_ttft_interval, cell.delta_tpot_interval, cell.probability) == (None, None, None)
    assert visited(one_cell(w_ttft=1, w_tpot=3)).decision == "pd"


def test_a_score_of_zero_stays_with_pd(one_cell):
    cell = visited(one_cell(ttft_x1_s=0.2, tpot_x1_s=0.010))
    assert (cell.score, cell.decision) == (0.0, "pd")


@pytest.mark.parametrize(
    ("x0", "x1", "decision", "rule", "evidence"),
    [
        (0.94, 0.95, "local", "x0_failed", "simulated"),
        (0.95, 0.94, "pd", "x1_failed", "simulated"),
        (0.94, 0.94, "pd", "both_failed", "insufficient"),
        (0.95, 0.95, "local", "equation1", "simulated"),
        (math.nan, 1.0, "pd", "undefined", "insufficient"),
        (1.0, None, "pd", "undefined", "insufficient"),
    ],
)
def test_b30_success_is_judged_before_equation_1(one_cell, x0, x1, decision, rule, evidence):
    cell = visited(one_cell(success_x0_ratio=x0, success_x1_ratio=x1))
    assert (cell.decision, cell.rule, cell.evidence) == (decision, rule, evidence)


@pytest.mark.parametrize("bad", [math.nan, None, 0.0, -0.1, math.inf])
@pytest.mark.parametrize("name", ["ttft_x0_s", "ttft_x1_s", "tpot_x0_s", "tpot_x1_s"])
def test_b30_a_missing_or_zero_mean_is_insufficient_and_takes_the_fallback(one_cell, name, bad):
    for fallback in ("pd", "local"):
        cell = visited(one_cell(fallback=fallback, **{name: bad}))
        assert (cell.decision, cell.evidence, cell.rule) == (fallback, "insufficient", "undefined")


def test_a_winner_by_success_needs_figures_of_its_own(one_cell):
    dead_x1 = {"success_x1_ratio": 0.0, "ttft_x1_s": math.nan, "tpot_x1_s": math.nan}
    assert visited(one_cell(**dead_x1)).decision == "pd"
    assert visited(one_cell(**dead_x1)).evidence == "simulated"
    assert visited(one_cell(**dead_x1, tpot_x0_s=math.nan)).evidence == "insufficient"


ratios = st.floats(0, 1) | st.just(math.nan)
means = st.sampled_from([math.nan, 0.0, math.inf]) | st.floats(1e-6, 1e3)
weights = st.floats(0, 1e6)
figures = st.fixed_dictionaries(
    {"ttft_x0_s": means, "ttft_x1_s": means, "tpot_x0_s": means, "tpot_x1_s": means}
    | {"success_x0_ratio": ratios, "success_x1_ratio": ratios}
)


@settings(max_examples=50, deadline=None)
@given(figures, weights, weights.filter(bool))
def test_b30_a_failed_side_never_wins_on_evidence(one_cell, figures, w_ttft, w_tpot):
    cell = visited(one_cell(w_ttft, w_tpot, **figures))
    if cell.evidence != "insufficient":
        side = {"pd": "x0", "local": "x1"}[cell.decision]
        assert figures[f"success_{side}_ratio"] >= 0.95
        assert 0 < figures[f"ttft_{side}_s"] < math.inf
        assert 0 < figures[f"tpot_{side}_s"] < math.inf


@settings(max_examples=50, deadline=None)
@given(figures, weights.filter(bool), weights, weights)
def test_b32_raising_w_tpot_never_turns_pd_into_local_where_local_has_the_higher_tpot(one_cell, figures, w_ttft, a, b):
    low, high = sorted((a, b))
    text = one_cell(w_ttft, low, **figures)
    before, after = visited(text), visited(reweigh(text, w_ttft, high))
    if (before.decision, after.decision) == ("pd", "local"):
        assert figures["tpot_x1_s"] < figures["tpot_x0_s"]


positive = st.floats(1e-6, 1e3)


@settings(max_examples=50, deadline=None)
@given(positive, positive, positive, positive, weights, weights)
def test_b30_exchanging_the_arms_flips_the_decision_where_one_is_better_on_both(one_cell, a, b, c, d, w_ttft, w_tpot):
    (fast, slow), (smooth, rough) = sorted((a, b)), sorted((c, d))
    if fast == slow or smooth == rough or max(w_ttft, w_tpot) == 0:
        return
    local = {"ttft_x0_s": slow, "ttft_x1_s": fast, "tpot_x0_s": rough, "tpot_x1_s": smooth}
    pd_ = {"ttft_x0_s": fast, "ttft_x1_s": slow, "tpot_x0_s": smooth, "tpot_x1_s": rough}
    assert visited(one_cell(w_ttft, w_tpot, **local)).decision == "local"
    assert visited(one_cell(w_ttft, w_tpot, **pd_)).decision == "pd"


def grid_deltas(grid):
    cells = dict.fromkeys((p.workload.name, p.qps) for p in grid)
    return delta_frame(*({"workload": w, "qps": q, "ttft_x1_s": 0.1 + q / 1000} for w, q in cells))


def test_the_papers_grid_gives_the_papers_axes_and_every_workload_its_own_cell(grid):
    table = DecisionTable.from_json(compile_table(grid_deltas(grid), grid, pair=PAIR, w_ttft=1, w_tpot=1))
    assert table.axes == PAPER_AXES
    places = dict.fromkeys((p.workload, p.qps) for p in grid)
    assert len(places) == 180
    for workload, qps in places:
        second = workload.turns[1]
        cell = table.lookup(
            context_tokens=workload.context_tokens(2),
            input_tokens=second.input_tokens,
            output_tokens=second.output_tokens,
            qps=qps,
        )
        assert cell.workloads == (workload.name,)
        assert cell.qps == qps


def test_the_class_that_the_grid_lacks_borrows_its_neighbour_and_says_so(grid):
    table = DecisionTable.from_json(compile_table(grid_deltas(grid), grid, pair=PAIR, w_ttft=1, w_tpot=1))
    huge = table.lookup(context_tokens=50_000, input_tokens=16, output_tokens=32, qps=8)
    large = table.lookup(context_tokens=2048, input_tokens=16, output_tokens=32, qps=8)
    assert (huge.key, huge.evidence, huge.borrowed_from) == ("huge/tiny/8", "extrapolated", "large/tiny/8")
    assert (huge.decision, huge.score, huge.workloads) == (large.decision, large.score, ())
    assert sum(c.evidence == "extrapolated" for c in table.cells) == 90
    assert table.unknown_ratio == 0


def test_a_borrowed_cell_is_no_better_than_its_source(one_cell):
    table = DecisionTable.from_json(one_cell(tpot_x0_s=0.0))
    assert {c.evidence for c in table.cells} == {"insufficient"}
    assert {c.borrowed_from for c in table.cells} == {None, "small/tiny/8"}


def test_a_place_that_was_never_run_is_insufficient_and_does_not_count_as_visited(make_point, make_workload):
    cells = [("tiny", 8.0), ("mid_bal", 2.0)]
    points = [make_point(a.name, workload=make_workload("small", t), qps=q) for a in PAIR for t, q in cells]
    frame = delta_frame({"workload": "small_tiny", "qps": 8.0}, {"workload": "small_mid_bal", "qps": 2.0})
    table = DecisionTable.from_json(compile_table(frame, points, pair=PAIR, w_ttft=1, w_tpot=1, fallback="local"))
    hole = table.lookup(context_tokens=256, input_tokens=16, output_tokens=32, qps=2)
    assert (hole.evidence, hole.rule, hole.decision, hole.visited) == ("insufficient", "unvisited", "local", False)
    assert table.unknown_ratio == 0


def test_points_without_deltas_are_visited_and_unknown(make_point, make_workload):
    points = [make_point(a.name, workload=make_workload("small", t)) for a in PAIR for t in ("tiny", "mid_bal")]
    frame = delta_frame({"workload": "small_tiny", "qps": 8.0})
    table = DecisionTable.from_json(compile_table(frame, points, pair=PAIR, w_ttft=1, w_tpot=1))
    assert table.unknown_ratio == 0.5
    with pytest.raises(NoEvidence, match=r"50% .* allowed 25% \(1 cells, first: small/mid_bal/8\)"):
        table.check_evidence()
    table.check_evidence(0.5)


def test_workloads_of_one_place_are_averaged_and_judged_by_the_worse_success(make_point, make_lengths):
    both = [make_lengths("a", (100, 100), (16, 32)), make_lengths("b", (50, 50), (16, 32))]
    points = [make_point(arm.name, workload=w) for arm in PAIR for w in both]
    frame = delta_frame(
        {"workload": "a", "qps": 8.0, "ttft_x0_s": 0.2},
        {"workload": "b", "qps": 8.0, "ttft_x0_s": 0.6, "success_x1_ratio": 0.96},
    )
    cell = visited(compile_table(frame, points, pair=PAIR, w_ttft=1, w_tpot=1))
    assert (cell.workloads, cell.n_pairs, cell.success_x1_ratio) == (("a", "b"), 14, 0.96)
    assert cell.delta_ttft == pytest.approx((0.4 - 0.1) / 0.4)


def test_lengths_outside_the_paper_become_types_of_their_own(make_point, make_lengths):
    points = [make_point(arm.name, workload=make_lengths("mine", (10, 10), (300, 20))) for arm in PAIR]
    frame = delta_frame({"workload": "mine", "qps": 8.0})
    assert visited(compile_table(frame, points, pair=PAIR, w_ttft=1, w_tpot=1)).key == "small/300to20/8"


def test_the_domain_comes_from_the_points(make_point):
    points = [make_point(arm.name, executor=Executor.LIVE, engine_version="0.19", sim=None) for arm in PAIR]
    text = compile_table(delta_frame({"workload": "small_tiny", "qps": 8.0}), points, pair=PAIR, w_ttft=1, w_tpot=1)
    domain = DecisionTable.from_json(text).domain
    assert (domain.layout, domain.baseline, domain.candidate) == ("1P_3D", "1P_3D", "1P_3pD")
    assert (domain.model, domain.gpu, domain.executor, domain.engine_version) == (
        "Llama-3.1-8B", "H100-80G", "measured", "0.19",
    )  # fmt: skip
    assert (domain.handoff, domain.kv_connector, domain.timeout_s) == ("push_blocking", "P2pNcclConnector", 30.0)
    assert visited(text).evidence == "measured"


def test_points_of_two_domains_are_refused(make_point):
    points = [make_point("1P_3D"), make_point("1P_3pD", gpu="H200")]
    with pytest.raises(SpecError, match="2 domains"):
        compile_table(delta_frame(), points, pair=PAIR, w_ttft=1, w_tpot=1)


def test_single_turn_points_make_no_table(make_point, make_lengths):
    points = [make_point(arm.name, workload=make_lengths("single", (8, 8))) for arm in PAIR]
    with pytest.raises(SpecError, match="two turns or more"):
        compile_table(delta_frame(), points, pair=PAIR, w_ttft=1, w_tpot=1)


def test_all_unusable_settings_are_told_at_once(make_point):
    with pytest.raises(SpecError) as caught:
        compile_table(
            delta_frame(), [make_point()], pair=PAIR, w_ttft=-1, w_tpot=math.nan, success_bound=95, fallback="x"
        )
    assert len(caught.value.problems) == 4
    with pytest.raises(SpecError, match="both 0"):
        compile_table(delta_frame(), [make_point()], pair=PAIR, w_ttft=0, w_tpot=0)


def test_same_inputs_give_same_bytes_whatever_their_order(grid):
    frame = grid_deltas(grid)
    text = compile_table(frame, grid, pair=PAIR, w_ttft=1, w_tpot=1)
    shuffled = frame.sample(frac=1, random_state=1).astype({"n_pairs": np.int32})
    assert compile_table(shuffled, grid[::-1], pair=PAIR, w_ttft=1.0, w_tpot=1.0) == text
    other = dataclasses.replace(grid[0], seed=1)
    assert (
        json.loads(compile_table(frame, [*grid[1:], other], pair=PAIR, w_ttft=1, w_tpot=1))["inputs_hash"]
        != (json.loads(text)["inputs_hash"])
    )


def test_deltas_of_other_pairs_are_left_out(one_cell, make_point):
    points = [make_point(arm.name) for arm in PAIR]
    cell = {"workload": "small_tiny", "qps": 8.0}
    other = cell | {"baseline": "2P_2D", "candidate": "2P_2pD", "ttft_x0_s": 99.0}
    mixed = compile_table(delta_frame(other, cell, other), points, pair=PAIR, w_ttft=1, w_tpot=1)
    assert mixed == one_cell()


def test_reweighing_equals_compiling_with_those_weights(grid):
    frame = grid_deltas(grid)
    text = compile_table(frame, grid, pair=PAIR, w_ttft=1, w_tpot=1)
    assert reweigh(text, 1, 2.45) == compile_table(frame, grid, pair=PAIR, w_ttft=1, w_tpot=2.45)
    assert reweigh(reweigh(text, 0, 5), 1, 1) == text


def test_diff_tells_the_cells_that_changed_and_no_others(grid):
    # S = 0.5 - qps / 200 - 0.2 w: with w = 2.15 the levels above QPS 14 go to pd.
    text = compile_table(grid_deltas(grid), grid, pair=PAIR, w_ttft=1, w_tpot=1)
    heavier = reweigh(text, 1, 2.15)
    assert diff_tables(text, text) == []
    changes = diff_tables(text, heavier)
    assert {c.key.split("/")[2] for c in changes} == {"16", "20"}
    assert len(changes) == 3 * 9 * 2
    assert {(c.decision_a, c.decision_b) for c in changes} == {("local", "pd")}


def test_diff_tells_cells_that_only_one_table_has(one_cell, grid):
    changes = diff_tables(one_cell(), compile_table(grid_deltas(grid), grid, pair=PAIR, w_ttft=1, w_tpot=1))
    # The small table has three places; its small cell and its borrowed huge cell are as in the large table.
    (evidence_only,) = (c for c in changes if c.evidence_a is not None)
    assert (evidence_only.key, evidence_only.evidence_a, evidence_only.evidence_b) == (
        "large/tiny/8", "extrapolated", "simulated",
    )  # fmt: skip
    assert len(changes) == 1 + 270 - 3
