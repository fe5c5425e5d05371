"""What goes between host and device in one iteration of the main path, and where.

    prompts (ids) ──▶ sampler ──▶ completions ──▶ texts for reward functions ──▶ scores
    scores, ids, log-probs stay ──▶ learner ──▶ one copy of all means; the store's copy of the rows

The bounds are what is there today; a change that asks the device more often has to say why.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.algorithms import tiny_runs as tiny
from tests.device import pretend

pytestmark = pytest.mark.usefixtures("ray_session")

ROWS, TOKENS = 12, 5  # of a batch of `tiny.grpo`, and of a completion at most
# Copies to the host and from there, and waits for sizes, of an iteration with four mini-batches.
# The learner's passes through packed rows ask nothing: it fetches ids and masks once (`shared`), as
# the environment's reference does for its pass.
OF_COLUMNS = "rollouts/judged_batch.py:<lambda>"  # by `JudgedBatch.to`
MOST = {
    "envs": {"to_device": 12, "to_host": 12, "wait": 3},
    "engines": {"to_device": 12, "to_host": 16, "wait": 1},
    "rollouts": {"to_device": 3, "to_host": 28},
    "shared": {"to_device": 2, "to_host": 3},  # scores and masks, which are made on the host
    "learners": {"to_device": 8, "to_host": 6},
    "modules": {"to_device": 50, "to_host": 2},
    "numerics": {"to_device": 2},
    "algorithms": {"to_host": 2, "wait": 1},
}


def transfers(gpu, make=tiny.grpo, **settings):
    """Of the second iteration; the first one probes the model."""
    config = make(**settings).learners(num_learners=0, num_gpus_per_learner=1)
    with tiny.built(config) as algorithm:
        algorithm.train()
        gpu.transfers.clear()
        algorithm.train()
    return list(gpu.transfers)


@pytest.fixture(scope="module")
def main_path(ray_session):
    with pretend.gpu() as gpu:
        return transfers(gpu)


def by_room(found) -> dict[str, Counter[str]]:
    rooms: dict[str, Counter[str]] = {}
    for transfer in found:
        rooms.setdefault(transfer.site.split("/")[0], Counter())[transfer.kind] += 1
    return rooms


def test_the_main_path_asks_the_device_no_more_often_than_it_has_to(main_path):
    rooms = by_room(main_path)
    assert rooms.keys() <= MOST.keys(), rooms
    for room, counts in rooms.items():
        for kind, count in counts.items():
            assert count <= MOST[room].get(kind, 0), (room, kind, sorted(
                (t.site, t.num_bytes) for t in main_path
                if t.kind == kind and t.site.startswith(room)
            ))  # fmt: skip


WAYS = {
    "GRPO": (tiny.grpo, {}),
    "PPO": (tiny.ppo, {}),
    "micro-batches": (tiny.grpo, {"micro_batch_tokens": 40}),
    "scores": (tiny.grpo, {
        "drop_zero_variance_groups": True, "scale_scores": True, "score_clip": 5.0,
        "missing_eos_penalty": 1.0, "length_penalty": 0.1,
    }),
    "KL to the learner's reference": (tiny.grpo, {"ref_kl_coeff": 0.1, "reference_in": "learner"}),
    "decoupled": (
        lambda **s: tiny.grpo(off_policy="decoupled", **s).streaming(max_staleness=1), {}
    ),
    "bfloat16": (lambda **s: tiny.grpo(**s).language_model(mixed_precision="bf16"), {}),
    "DPO": (tiny.dpo, {}),
    "SFT": (tiny.sft, {}),
    "reward model": (lambda **s: tiny.reward_model(**s).language_model(
        model=f"{tiny.HERE}.build_classifier"
    ), {}),
}  # fmt: skip


SLOW_WAYS = {
    "PPO", "micro-batches", "scores", "KL to the learner's reference", "decoupled", "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("way", [
    pytest.param(way, marks=pytest.mark.slow) if way in SLOW_WAYS else way for way in WAYS
])  # fmt: skip
def test_a_learner_waits_twice_an_update_and_once_a_mini_batch(way, gpu):
    """For the masks of what was sampled beside it and for all means; and for whether loss and
    gradient are finite."""
    make, settings = WAYS[way]
    config = make(**settings)
    found = []

    class Counting(config.get_default_learner_class()):
        def update(self, *args, **kwargs):
            before = len(gpu.transfers)
            result = super().update(*args, **kwargs)
            found.append([t for t in gpu.transfers[before:] if t.waits])
            return result

        def start_update(self, rows, minibatches):
            super().start_update(rows, minibatches)
            self.num_steps = len(minibatches)

    config = config.learners(num_learners=0, num_gpus_per_learner=1, learner_class=Counting)
    with tiny.built(config) as algorithm:
        for _ in range(2):  # the first one probes the model
            algorithm.train()
        num_steps = algorithm.learner_group._learner.num_steps
    assert num_steps > 0 and len(found) == 2
    assert len(found[-1]) <= 2 + num_steps, Counter(t.site for t in found[-1])


def test_nothing_larger_than_ids_moves_on_the_main_path(main_path):
    largest = max(main_path, key=lambda transfer: transfer.num_bytes)
    metrics_of_an_update = 1024
    ids_masks_and_versions = ROWS * ((8 + TOKENS) * (8 + 1) + TOKENS * (1 + 4) + 4 * 8)
    assert largest.num_bytes <= max(metrics_of_an_update, ids_masks_and_versions), largest


def test_ids_leave_the_device_for_texts_and_for_the_store_alone(main_path):
    """[rows, tokens] int64: for reward functions, which read texts, for the store of rollouts, for
    the layout of rows, which the learner fetches once, and for the share of distinct completions.
    (The ledger's five numbers of each row are as large here, where a row has five tokens.)"""
    of_ids = {t.site for t in main_path if t.kind == "to_host" and t.num_bytes >= ROWS * TOKENS * 4}
    readers = (
        "envs/bandit.py",
        "envs/judges/",
        "rollouts/judged_batch.py",
        "learners/metrics.py",
        "learners/rlhf_learner.py:prepare",
        "shared/columns.py:fetched",
    )
    assert {site for site in of_ids if not site.startswith(readers)} == set()


@pytest.mark.slow  # with one, the store alone is given ids: above
def test_without_a_store_of_rollouts_the_learner_hands_nothing_back(gpu):
    found = transfers(gpu, lambda **s: tiny.grpo(**s).rollouts(store_rollouts=False))
    assert OF_COLUMNS not in {t.site for t in found}
    of_learners = [t for t in found if t.site.startswith("learners") and t.kind == "to_host"]
    assert max(t.num_bytes for t in of_learners if "metrics" not in t.site) <= ROWS * 8


def test_groups_that_stream_stay_on_the_device(main_path, gpu):
    """Nothing of them is asked for where nothing of a batch is that was sampled on demand."""
    found = transfers(gpu, lambda **s: tiny.grpo(off_policy="bypass", **s).streaming(
        max_staleness=1, groups_per_lease=4
    ))  # fmt: skip
    of_samplers, on_demand = (
        {t.site for t in each if t.site.startswith("rollouts/")} for each in (found, main_path)
    )
    assert of_samplers <= on_demand


@pytest.mark.slow
def test_more_rows_and_more_tokens_are_no_more_transfers_in_the_learner(gpu):
    """The number of passes decides, not what is in them."""

    def in_learner(**settings):
        found = transfers(gpu, **settings)
        rooms = ("learners", "numerics", "modules/packing")
        return Counter(t.kind for t in found if t.site.startswith(rooms))

    few = in_learner()
    many = in_learner(train_batch_size_per_learner=36, minibatch_size=18)
    assert few == many
