"""The engine on a mesh of two virtual devices: the same tokens, both halves at work, all pools full again."""

import pytest

from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from tests.support.children import served
from tests.support.drafting import draft_twin
from tests.support.toy import MAX_POSITIONS, make_table, random_prompt, sampled_twin

pytestmark = pytest.mark.toy


@pytest.mark.slow
@pytest.mark.parametrize("case", ["one", "two", "tight", "apart"])
def test_every_request_gets_the_tokens_that_it_has_alone(case: str) -> None:
    table = make_table()
    assert served()[case]["tokens"] == {
        str(i): sampled_twin(
            table,
            random_prompt(1 + 5 * i % 31, seed=i),
            SamplingParams(seq_seed=i, temperature=0.9 * (i % 2)),
            2 + i % 9,
        )
        for i in range(16)
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", ["one", "two", "tight", "apart"])
def test_every_request_with_drafts_gets_the_tokens_that_it_has_alone(case: str) -> None:
    table, found = make_table(), served(num_drafts=2)[case]["tokens"]
    for i in range(16):
        prompt, params = random_prompt(1 + 5 * i % 31, seed=i), SamplingParams(seq_seed=i, temperature=0.9 * (i % 2))
        params.max_tokens = 2 + i % 9
        assert found[str(i)] == draft_twin(table, prompt, params, 2, MAX_POSITIONS).tokens


@pytest.mark.slow
def test_requests_are_spread_over_both_data_indices_and_the_cache_over_both_devices() -> None:
    assert served()["one"]["data_indices"] == [0]
    for case in ("two", "tight", "apart"):
        assert served()[case]["data_indices"] == [0, 1]
        assert served()[case]["cache_devices"] == 2


@pytest.mark.slow
def test_the_pools_of_both_indices_are_full_at_the_end() -> None:
    # Six slots of 10 blocks each; with two indices three slots and their blocks each.
    assert served()["one"]["pools"] == served()["two"]["pools"] == [60, 60, 6, 6]
    # Seven sequences: four slots each; 11 blocks are little more than one sequence of full length.
    assert served()["tight"]["pools"] == [22, 22, 8, 8]
    assert served()["tight"]["num_preemptions"] > 0
    assert {case["aborted"] for case in served().values()} == {1}


def test_a_hit_happens_on_the_data_index_that_holds_the_blocks() -> None:
    reuse = served("two_devices_reuse")["reuse"]
    assert sorted(reuse["wrote"]) == [0, 1]
    assert reuse["found"] == reuse["wrote"] * 2
    assert reuse["cached"] == [16] * 4
    assert reuse["tokens"] == [
        alone(random_prompt(16, seed=i % 2) + random_prompt(5, seed=10 + i), i, 8) for i in range(4)
    ]


def test_a_sequence_is_handed_over_between_any_numbers_of_data_indices() -> None:
    expected = [alone(random_prompt(length, seed=i), i, 8) for i, length in enumerate([1, 3, 4, 8, 17, 30])]
    assert served("two_devices_reuse")["handed"] == [expected] * 2


def alone(prompt: list[int], seed: int, count: int) -> list[int]:
    return sampled_twin(make_table(), prompt, SamplingParams(seq_seed=seed, temperature=0.9 * (seed % 2)), count)
