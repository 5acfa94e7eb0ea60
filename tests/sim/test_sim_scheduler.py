"""One engine's scheduling, step by step, with a step that takes one second unless said."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_points import LLAMA, constant_cost, drive, make_seq, make_worker

from ppd_bench.sim.profile import find_hardware, roofline
from ppd_bench.sim.worker import DECODING, HELD, PULL, WAITING, Seq

ONE_SECOND = constant_cost(1.0)
LENGTHS = st.tuples(st.integers(1, 300), st.integers(1, 40), st.floats(0.0, 20.0))


@settings(max_examples=60, deadline=None)
@given(st.lists(LENGTHS, min_size=1, max_size=15), st.sampled_from([16, 50, 200]), st.sampled_from([1, 4, 16]))
def test_no_step_exceeds_the_token_budget_or_the_sequence_slots(
    requests: list[tuple[int, int, float]], budget: int, max_num_seqs: int
) -> None:
    worker = make_worker(ONE_SECOND, n_blocks=60, budget=budget, max_num_seqs=max_num_seqs, cap=1)
    ordered = sorted(requests, key=lambda request: request[2])
    steps, ended = drive(worker, [(t, make_seq(i, n_in, n_out)) for i, (n_in, n_out, t) in enumerate(ordered)])
    assert max(step.n_tokens for step in steps) <= budget
    assert max(step.n_running for step in steps) <= max_num_seqs
    assert len(ended) == len(requests)
    assert all(step.n_tokens > 0 for step in steps)
    assert worker.pool.used == 0


def test_a_long_prompt_is_spread_over_steps_of_the_budget() -> None:
    steps, ended = drive(make_worker(ONE_SECOND, budget=256, cap=1), [(0.0, make_seq(1, 1000, 3))])
    assert [step.chunks.get(1) for step in steps] == [256, 256, 256, 232, None, None]
    assert ended == {1: 6.0}  # four steps to the first token, two more tokens


def test_decodes_go_on_while_a_prompt_is_prefilled() -> None:
    worker = make_worker(ONE_SECOND, budget=256, cap=1)
    steps, ended = drive(worker, [(0.0, make_seq(1, 10, 20)), (2.5, make_seq(2, 1000, 1))])
    assert [(step.n_decode, step.chunks) for step in steps[:8]] == [
        (0, {1: 10}),
        (1, {}),
        (1, {}),
        (1, {2: 255}),  # decodes come first: one token of the budget is theirs
        (1, {2: 255}),
        (1, {2: 255}),
        (1, {2: 235}),
        (1, {}),
    ]
    assert ended == {2: 7.0, 1: 20.0}


def test_a_mixed_step_costs_what_its_mix_costs() -> None:
    cost = roofline(find_hardware("h100-80g"), LLAMA, 1)
    worker = make_worker(cost, budget=256, step_overhead_s=0.001, sequence_overhead_s=1e-5, cap=1)
    seqs = [(0.0, make_seq(1, 500, 60)), (0.0, make_seq(2, 10, 60)), (0.1, make_seq(3, 600, 1))]
    steps, _ = drive(worker, seqs)
    first = next(i for i, step in enumerate(steps) if 3 in step.chunks)
    step, following = steps[first], steps[first + 1]
    assert (step.n_decode, step.chunks) == (2, {3: 254})
    # Request 1 (500 tokens) took two steps to its first token, request 2 waited for the second of them.
    context = (500 + 1 + first - 2) + (10 + 1 + first - 2)
    expected = cost.mixed_s(254, 1, 254**2 / 2, 254, 2, context)
    assert step.end_s - step.start_s == pytest.approx(expected + 0.001 + 3e-5, rel=1e-12)
    expected = cost.mixed_s(254, 1, 254 * 254 + 254**2 / 2, 508, 2, context + 2)
    assert following.end_s - following.start_s == pytest.approx(expected + 0.001 + 3e-5, rel=1e-12)


def test_a_pure_decode_step_costs_its_line_and_the_overhead_per_sequence() -> None:
    cost = roofline(find_hardware("h100-80g"), LLAMA, 1)
    worker = make_worker(cost, step_overhead_s=0.002, sequence_overhead_s=1e-5, cap=1)
    steps, _ = drive(worker, [(0.0, make_seq(1, 100, 5)), (0.0, make_seq(2, 200, 5))])
    for k, step in enumerate(steps[1:], start=1):
        expected = cost.decode_line(2).at(300 + 2 * k) + 0.002 + 2e-5
        assert step.end_s - step.start_s == pytest.approx(expected, rel=1e-9)


def test_requests_are_admitted_first_come_first_served() -> None:
    worker = make_worker(ONE_SECOND, max_num_seqs=1, cap=1)
    seqs = [make_seq(i, 10, 3) for i in range(4)]
    _, ended = drive(worker, [(0.0, seqs[2]), (0.1, seqs[0]), (0.2, seqs[3]), (0.3, seqs[1])])
    assert ended == {2: 3.0, 0: 6.0, 3: 9.0, 1: 12.0}


def test_a_short_request_waits_behind_a_long_one_that_does_not_fit() -> None:
    """The memory wall: 10 blocks of 16; the first takes 7 to 9, the second needs 7, the third only 1."""
    worker = make_worker(ONE_SECOND, n_blocks=10, cap=1)
    _, ended = drive(worker, [(0.0, make_seq(1, 100, 40)), (0.5, make_seq(2, 100, 1)), (0.6, make_seq(3, 10, 1))])
    assert ended == {1: 40.0, 2: 41.0, 3: 41.0}


def test_the_youngest_is_preempted_and_recomputed_with_what_is_still_cached() -> None:
    """8 blocks of 4, two requests of 8 prompt and 20 generated tokens, worked out by hand.

    Both hold 4 blocks and 17 tokens after step 8. Step 9 needs 2 more blocks and there is none: B, the younger, goes; A takes
    one of B's 4 cached blocks, and two more at 21 and 25 tokens. A ends with step 19. B finds 1 block, computes
    17 - 4 = 13 tokens in step 20, which gives its 10th token, and its 20th in step 30.
    """
    worker = make_worker(ONE_SECOND, n_blocks=8, block_size=4, cap=1)
    older, younger = make_seq(1, 8, 20), make_seq(2, 8, 20)
    steps, ended = drive(worker, [(0.0, older), (0.0, younger)])
    assert [step.n_decode for step in steps] == [0] + [2] * 8 + [1] * 11 + [0] + [1] * 10
    assert steps[20].chunks == {2: 13}
    assert ended == {1: 20.0, 2: 31.0}
    assert (older.n_preempted, younger.n_preempted) == (0, 1)
    assert younger.hit_tokens == 0  # what its first admission found, not what it finds of itself


def test_preempted_requests_return_in_their_order_of_arrival() -> None:
    worker = make_worker(ONE_SECOND, n_blocks=9, block_size=4, cap=1)
    seqs = [make_seq(i, 8, 16) for i in range(4)]
    _, ended = drive(worker, [(0.0, seq) for seq in seqs])
    assert sum(seq.n_preempted for seq in seqs) >= 2
    assert sorted(ended, key=lambda owner: ended[owner]) == [0, 1, 2, 3]


def test_a_prefill_that_finds_no_blocks_is_preempted_itself() -> None:
    """10 blocks of 4: a finished request holds 4 of them; a prompt of 10 blocks gets through 6 and has to give them back."""
    worker = make_worker(ONE_SECOND, n_blocks=10, block_size=4, budget=8, cap=1)
    held, long = make_seq(1, 16, 1), make_seq(2, 39, 1)
    worker.add(held)
    worker.add(long)
    now_s = 0.0
    while worker.start(now_s):
        now_s = worker.busy_until_s
        worker.finish_step()
    assert (held.state, long.state, long.n_preempted) == (HELD, WAITING, 1)
    assert (worker.pool.used, worker.pool.cached) == (4, 6)
    worker.release(held)
    assert worker.start(now_s)
    assert worker.scheduled == [long]
    assert long.computed == 24  # six blocks of its own are still there


def test_a_request_whose_kv_has_arrived_goes_before_one_that_was_preempted() -> None:
    """Else the preempted one waits for blocks that the other holds, for ever.

    10 blocks of 4: X decodes with 4 to 5 blocks, L has pulled 20 tokens into 5. X needs a 6th block at 21 tokens.
    """
    worker = make_worker(ONE_SECOND, n_blocks=10, block_size=4, cap=1)
    decoding, pulling = make_seq(1, 16, 30), make_seq(2, 20, 2, remote=PULL)
    worker.add(decoding)
    worker.add(pulling)
    now_s = 0.0
    for _ in range(5):
        assert worker.start(now_s)
        now_s = worker.busy_until_s
        worker.finish_step()
    assert worker.pool.available() == 0
    worker.pulled(pulling)
    assert worker.start(now_s)
    assert decoding.n_preempted == 1
    assert worker.scheduled == [pulling]


def test_a_prompt_that_is_cached_completely_still_computes_a_token() -> None:
    """64 tokens are four full blocks of 16; the last one is computed again, since a step must yield a token."""
    worker = make_worker(ONE_SECOND, cap=1)
    first, second = make_seq(1, 64, 20, first_block=0), make_seq(2, 64, 1, first_block=0)
    steps, _ = drive(worker, [(0.0, first), (50.0, second)])
    assert steps[-1].chunks == {2: 16}
    assert (first.hit_tokens, second.hit_tokens) == (0, 48)


@pytest.mark.parametrize(
    ("prompt", "hit", "chunk"), [(48, 32, 16), (49, 48, 1), (63, 48, 15), (80, 64, 16), (100, 80, 20)]
)
def test_what_a_sequence_decoded_is_found_down_to_the_last_full_block(prompt: int, hit: int, chunk: int) -> None:
    """64 + 20 tokens leave 83 in KV (the last one sampled is not): five full blocks."""
    worker = make_worker(ONE_SECOND, cap=1)
    later = make_seq(2, prompt, 1, first_block=0)
    steps, _ = drive(worker, [(0.0, make_seq(1, 64, 20, first_block=0)), (50.0, later)])
    assert (later.hit_tokens, steps[-1].chunks) == (hit, {2: chunk})


def test_a_prompt_is_findable_as_soon_as_it_is_computed() -> None:
    worker = make_worker(ONE_SECOND, cap=1)
    second = make_seq(2, 64, 1, first_block=0)
    drive(worker, [(0.0, make_seq(1, 64, 100, first_block=0)), (1.5, second)])
    assert second.hit_tokens == 48


def test_without_prefix_caching_everything_is_computed_again() -> None:
    worker = make_worker(ONE_SECOND, caching=False, cap=1)
    second = make_seq(2, 64, 1, first_block=0)
    steps, _ = drive(worker, [(0.0, make_seq(1, 64, 2, first_block=0)), (50.0, second)])
    assert (second.hit_tokens, steps[-1].chunks) == (0, {2: 64})


def test_a_decode_takes_a_block_when_its_last_one_is_full() -> None:
    """32 prompt tokens fill 2 blocks of 16; tokens 33, 49 and 65 open the next."""
    worker = make_worker(ONE_SECOND, cap=1)
    seq = make_seq(1, 32, 40)
    worker.add(seq)
    used = []
    now_s = 0.0
    while worker.start(now_s):
        used.append(worker.pool.used)
        now_s = worker.busy_until_s
        for done in worker.finish_step():
            worker.release(done)
    assert used == [2] * 1 + [3] * 16 + [4] * 16 + [5] * 7


def test_blocks_in_use_are_known_within_a_stretch() -> None:
    worker = make_worker(ONE_SECOND, cap=96)
    worker.add(make_seq(1, 32, 40))
    assert worker.start(0.0)
    worker.finish_step()
    assert worker.start(1.0)
    assert worker.busy_until_s == 40.0
    assert [worker.used_blocks_at(t) for t in (1.5, 16.5, 17.5, 32.5, 33.5, 39.5)] == [3, 3, 4, 4, 5, 5]


def test_an_aborted_decode_leaves_after_the_step_that_runs() -> None:
    worker = make_worker(ONE_SECOND, cap=1)
    stays, leaves = make_seq(1, 10, 10), make_seq(2, 10, 10)
    worker.add(stays)
    worker.add(leaves)
    worker.start(0.0)
    worker.finish_step()
    worker.start(1.0)
    assert leaves.state == DECODING
    assert worker.abort(leaves)  # to be swept after the step
    worker.finish_step()
    worker.sweep_aborted([leaves])
    worker.start(2.0)
    assert (worker._n_decoding, list(worker.running)) == (1, [stays])
    assert worker.pool.used == 1


def test_an_aborted_waiting_request_leaves_at_once() -> None:
    worker = make_worker(ONE_SECOND, max_num_seqs=1, cap=1)
    seqs: list[Seq] = [make_seq(i, 10, 5) for i in range(3)]
    for seq in seqs:
        worker.add(seq)
    worker.start(0.0)
    assert not worker.abort(seqs[1])
    assert list(worker.waiting) == [seqs[2]]


@pytest.mark.parametrize("caching", [True, False])
def test_a_step_that_preempts_admits_nobody_while_others_run(caching: bool) -> None:
    """As in vLLM: blocks that were just taken from one are not given to the next in line, nor back to it."""
    worker = make_worker(ONE_SECOND, n_blocks=14, block_size=4, budget=8, caching=caching, cap=1)
    for i in range(6):
        worker.add(make_seq(i, 5 + i, 20))
    now_s, n_preempting, n_ended = 0.0, 0, 0
    while True:
        before, running = worker.n_preempted, set(worker.running)
        if not worker.start(now_s):
            break
        if worker.n_preempted > before and worker._n_decoding:
            n_preempting += 1
            assert set(worker.running) < running
        now_s = worker.busy_until_s
        for seq in worker.finish_step():
            worker.release(seq)
            n_ended += 1
    assert n_preempting >= 2
    assert n_ended == 6
