import itertools
import json
import math
import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd_bench.core.errors import NoEvidence, TableError, WrongDomain
from ppd_bench.core.point import content_hash
from ppd_bench.core.topology import parse_topology
from ppd_bench.policy.axes import PAPER_AXES, PAPER_TYPES, Axes, ContextClass, WorkloadType
from ppd_bench.policy.table import Cell, DecisionTable, Domain, Rules, Weights, cell_key


def a_cell(context: str, kind: str, qps: float, **changes) -> Cell:
    content = {
        "key": cell_key(context, kind, qps), "context": context, "type": kind, "qps": qps,
        "workloads": (f"{context}_{kind}",),
        "decision": "local", "evidence": "measured", "rule": "equation1", "score": 0.5,
        "delta_ttft": 0.5, "delta_tpot": 0.0,
        "ttft_x0_s": 0.2, "ttft_x1_s": 0.1, "tpot_x0_s": 0.01, "tpot_x1_s": 0.01,
        "success_x0_ratio": 1.0, "success_x1_ratio": 1.0, "n_pairs": 80,
    }  # fmt: skip
    return Cell(**(content | changes))


def a_table(axes: Axes = PAPER_AXES, **cell_changes) -> DecisionTable:
    places = itertools.product(axes.contexts, axes.types, axes.qps)
    return DecisionTable(
        domain=Domain(
            model="Llama-3.1-8B",
            gpu="H100-80G",
            layout="1P_3D",
            baseline="1P_3D",
            candidate="1P_3pD",
            executor="measured",
            engine_version="0.19",
            kv_connector="NixlConnector",
            handoff="pull_async",
            timeout_s=30.0,
        ),
        axes=axes,
        weights=Weights(w_ttft=1.0, w_tpot=3.0),
        rules=Rules(success_bound=0.95, fallback="pd", max_unknown_ratio=0.2),
        inputs_hash="0" * 16,
        cells=tuple(a_cell(c.name, t.name, q, **cell_changes) for c, t, q in places),
    )


TEXT = a_table().to_json()
TABLE = DecisionTable.from_json(TEXT)


def edited(edit, *, rehash=True) -> str:
    content = json.loads(TEXT)
    edit(content)
    if rehash:
        del content["content_hash"]
        content["content_hash"] = content_hash(content)
    return json.dumps(content)


def test_reading_and_writing_are_inverse_and_give_the_same_bytes():
    assert TABLE.to_json() == TEXT
    assert json.loads(TEXT)["content_hash"] == TABLE.content_hash
    assert list(json.loads(TEXT)) == sorted(json.loads(TEXT))


@pytest.mark.parametrize("turn1", [(128, 128), (1024, 1024)])
@pytest.mark.parametrize("kind", PAPER_TYPES, ids=lambda t: t.name)
def test_each_of_the_18_workloads_maps_back_to_its_own_cell_at_each_qps(turn1, kind):
    for qps in PAPER_AXES.qps:
        cell = TABLE.lookup(
            context_tokens=sum(turn1), input_tokens=kind.input_tokens, output_tokens=kind.output_tokens, qps=qps
        )
        assert (cell.context, cell.type, cell.qps) == ("small" if turn1 == (128, 128) else "large", kind.name, qps)


@given(st.integers(-1, 10**30), st.integers(-1, 10**30), st.integers(-1, 10**30), st.floats(allow_nan=True))
def test_every_query_is_answered_by_the_cell_of_its_place(context, n_in, n_out, qps):
    cell = TABLE.lookup(context_tokens=context, input_tokens=n_in, output_tokens=n_out, qps=qps)
    axes = TABLE.axes
    assert cell.context == axes.contexts[axes.context_index(context)].name
    assert cell.type == axes.types[axes.type_index(n_in, n_out)].name
    assert cell.qps == axes.qps[axes.qps_index(qps)]


@pytest.mark.parametrize(
    ("tokens", "name"), [(0, "small"), (512, "small"), (513, "large"), (4096, "large"), (4097, "huge"), (10**9, "huge")]
)
def test_context_edges_are_inclusive_above(tokens, name):
    assert PAPER_AXES.contexts[PAPER_AXES.context_index(tokens)].name == name


@pytest.mark.parametrize(
    ("qps", "level"),
    [(0, 0.5), (0.7, 0.5), (0.75, 1), (1.4, 1), (1.5, 2), (9, 10), (8.9, 8), (14, 16), (math.inf, 20), (math.nan, 20)],
)
def test_qps_goes_to_the_nearest_level_and_half_way_upwards(qps, level):
    assert PAPER_AXES.qps[PAPER_AXES.qps_index(qps)] == level


@pytest.mark.parametrize(
    ("n_in", "n_out", "name"),
    [
        (0, 0, "tiny"),
        (20, 30, "tiny"),
        (100, 110, "mid_bal"),
        (100_000, 10, "huge_paste"),
        (64, 100_000, "very_long_gen"),
        (700, 60, "big_paste"),
        # log2 distances: 362 is just below half-way from 256 to 512.
        (362, 64, "mid_paste"),
        (363, 64, "big_paste"),
    ],
)
def test_a_request_goes_to_the_nearest_type_on_the_log_scale(n_in, n_out, name):
    assert PAPER_AXES.types[PAPER_AXES.type_index(n_in, n_out)].name == name


def test_equally_near_types_go_to_the_first_listed():
    types = tuple(WorkloadType(name=n, input_tokens=i, output_tokens=8) for n, i in (("b", 16), ("a", 4)))
    axes = Axes(contexts=PAPER_AXES.contexts, types=types, qps=(1.0,))
    assert axes.types[axes.type_index(8, 8)].name == "b"


def test_a_loaded_table_uses_its_own_axes():
    axes = Axes(
        contexts=(ContextClass(name="short", max_tokens=10), ContextClass(name="long", max_tokens=None)),
        types=(WorkloadType(name="only", input_tokens=5, output_tokens=5),),
        qps=(3.0,),
    )
    table = DecisionTable.from_json(a_table(axes).to_json())
    assert table.lookup(context_tokens=11, input_tokens=1, output_tokens=1, qps=99).key == "long/only/3"


def test_a_decision_names_its_table_cell_evidence_and_rule():
    cell = TABLE.lookup(context_tokens=256, input_tokens=16, output_tokens=32, qps=8)
    assert TABLE.reason(cell) == f"table {TABLE.content_hash} small/tiny/8 measured equation1"


def test_a_look_up_takes_less_than_ten_microseconds():
    def look():
        TABLE.lookup(context_tokens=300, input_tokens=20, output_tokens=30, qps=7.2)

    assert min(timeit.repeat(look, number=2000, repeat=5)) / 2000 < 10e-6


@pytest.mark.parametrize("text", ["", "{", "[]", "3", TEXT[:-40], "[" * 100_000])
def test_text_that_is_no_table_is_a_table_error(text):
    with pytest.raises(TableError, match="build it again with build-table"):
        DecisionTable.from_json(text)


@pytest.mark.parametrize("version", ["2.0", "0.9", "11.0"])
def test_another_major_schema_is_refused(version):
    with pytest.raises(WrongDomain, match=f"schema version {version}, this program reads 1.x"):
        DecisionTable.from_json(edited(lambda c: c.update(schema_version=version)))


def test_a_newer_minor_schema_with_more_keys_is_read():
    def newer(content):
        content.update(schema_version="1.7", novelty=1)
        content["cells"][0]["novelty"] = 2

    assert DecisionTable.from_json(edited(newer)).schema_version == "1.7"


@pytest.mark.parametrize("version", [None, 1, {}])
def test_a_missing_schema_version_is_damage(version):
    with pytest.raises(TableError, match="schema_version must be text"):
        DecisionTable.from_json(edited(lambda c: c.update(schema_version=version)))


def test_a_changed_decision_without_its_hash_is_damage():
    def flip(content):
        content["cells"][7]["decision"] = "pd"

    with pytest.raises(TableError, match="content_hash"):
        DecisionTable.from_json(edited(flip, rehash=False))
    assert DecisionTable.from_json(edited(flip)).cells[7].decision == "pd"


def test_nan_is_damage():
    with pytest.raises(TableError, match="NaN"):
        DecisionTable.from_json(TEXT.replace('"score": 0.5', '"score": NaN', 1))


def test_all_problems_of_a_file_are_told_at_once():
    def damage(content):
        del content["domain"]["gpu"]
        content["cells"][3]["decision"] = "maybe"
        content["cells"][4]["n_pairs"] = "many"
        content["rules"]["success_bound"] = "0.95"

    with pytest.raises(TableError) as caught:
        DecisionTable.from_json(edited(damage))
    for place in ("domain.gpu", "cells.3.decision", "cells.4.n_pairs", "rules.success_bound"):
        assert place in str(caught.value)


def test_cells_must_cover_the_axes_in_order():
    with pytest.raises(TableError, match="270 places, the file has 269"):
        DecisionTable.from_json(edited(lambda c: c["cells"].pop()))
    with pytest.raises(TableError, match=r"cells.0: expected small/tiny/0.5, found huge/huge_paste/20"):
        DecisionTable.from_json(edited(lambda c: c["cells"].reverse()))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda a: a["contexts"][-1].update(max_tokens=9999), "last context class must be unbounded"),
        (lambda a: a["contexts"][0].update(max_tokens=5000), "context edges"),
        (lambda a: a["contexts"][0].update(max_tokens=None), "context edges"),
        (lambda a: a["contexts"].clear(), "last context class"),
        (lambda a: a["types"].clear(), "workload types must exist"),
        (lambda a: a["types"][0].update(a["types"][1]), "differ"),
        (lambda a: a["types"][0].update(input_tokens=0), "1 token or more"),
        (lambda a: a["qps"].reverse(), "QPS levels"),
        (lambda a: a["qps"].clear(), "QPS levels"),
        (lambda a: a["contexts"][0].update(name="huge"), "names on one axis"),
    ],
)
def test_axes_that_give_no_unique_place_are_damage(edit, message):
    with pytest.raises(TableError, match=message):
        DecisionTable.from_json(edited(lambda c: edit(c["axes"])))


@pytest.mark.parametrize("name", ["1P_3D", "1P_3pD", "1P_1D_2pD"])
def test_every_topology_of_the_layout_is_in_the_domain(name):
    TABLE.check_domain(topology=parse_topology(name), model="Llama-3.1-8B", gpu="H100-80G")


@pytest.mark.parametrize("name", ["4R", "2P_2D", "1P_3D@tp2", "1R_1P_2D"])
def test_another_layout_is_outside_the_domain(name):
    with pytest.raises(WrongDomain, match="layout '1P_3D', not"):
        TABLE.check_domain(topology=parse_topology(name), model="Llama-3.1-8B", gpu="H100-80G")


def test_every_difference_of_domain_is_told():
    with pytest.raises(WrongDomain, match=r"layout .* model 'Llama-3.1-8B', not 'x'; gpu 'H100-80G', not 'y'"):
        TABLE.check_domain(topology=parse_topology("2P_2D"), model="x", gpu="y")


def test_a_table_that_knows_too_little_refuses_to_start():
    TABLE.check_evidence()
    blind = a_table(evidence="insufficient")
    assert blind.unknown_ratio == 1.0
    with pytest.raises(NoEvidence, match=r"100% .* more than the allowed 20% \(270 cells, first: small/tiny/0.5"):
        blind.check_evidence()
    blind.check_evidence(max_unknown_ratio=1.0)


def test_cells_that_the_grid_never_visited_do_not_count_and_a_grid_of_none_knows_nothing():
    assert a_table(evidence="insufficient", workloads=()).unknown_ratio == 1.0
    some = a_table()
    cells = (*some.cells[:-1], a_cell("huge", "huge_paste", 20.0, evidence="insufficient", workloads=()))
    table = DecisionTable(
        **{n: getattr(some, n) for n in ("domain", "axes", "weights", "rules", "inputs_hash")}, cells=cells
    )
    assert table.unknown_ratio == 0.0
