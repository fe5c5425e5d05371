"""Games of two policies: whose rows are whose, and who learns from them."""

from __future__ import annotations

import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_llm.algorithms.grpo import GRPOConfig
from rllib_llm.algorithms.self_play import SelfPlayConfig
from rllib_llm.conversations.proof import USER
from rllib_llm.engines.protocol import Ended
from rllib_llm.envs.checks.check_env import check_env
from rllib_llm.envs.conversation import Response
from rllib_llm.envs.conversation_judging import judge
from rllib_llm.envs.self_play import SelfPlayEnv, run_games
from rllib_llm.envs.toys import guessing
from rllib_llm.rollouts.self_play import PlayersPolicy
from rllib_llm.shared import columns
from rllib_llm.shared.ray_compat import local_learner
from rllib_llm.weights.exporter import OPPONENT, TwoModules
from rllib_llm.weights.flat_buffer import pack
from tests.algorithms import tiny_runs as tiny
from tests.conversations.scripted import settings


def scripted(env, *turns):
    """A player that says these."""

    async def complete(token_ids, room, row, turn):
        chat_format = env.chat_format
        ids = chat_format.encode(turns[min(turn, len(turns) - 1)] + chat_format.turn_end)
        return Ended(0, ids, [-0.5] * len(ids), [3] * len(ids), "stop")

    return complete


def play(env, firsts, seconds, num_prompts=1, num_completions=1):
    attempts = run_games(
        env, env.tasks.rows(0, num_prompts), first_position=0, num_completions=num_completions,
        completes=(scripted(env, *firsts), scripted(env, *seconds)), max_new_tokens=50,
    )  # fmt: skip
    return attempts, judge(env, attempts, 0)


@pytest.fixture
def env():
    made = guessing.Guessing({"shuffle": False})
    yield made
    made.close()


def test_each_player_has_rows_groups_and_scores_of_its_own(env):
    # The secret is 1: "5" and "2" are too high, and the second answer is wrong.
    attempts, judged = play(env, ["5", "2", "1"], ["<", ">", "="])
    asker, answerer = (attempt.conversation for attempt in attempts)
    assert [m["content"] for m in asker.messages] == ["?", "5", "<", "2", ">", "1", "="]
    assert [m["content"] for m in answerer.messages] == ["1:5", "<", "1:2", ">", "1:1", "="]
    assert judged.columns[columns.ROW_ID].tolist() == [0, 1]
    assert judged.columns[columns.GROUP].tolist() == [0, 1]
    # Found, with three questions at 0.05; two answers of three are right.
    assert judged.columns[columns.SCORES].tolist() == pytest.approx([1 - 0.15, 2 / 3])
    assert float(judged.metrics["asker_score"][0]) == pytest.approx(0.85)
    assert float(judged.metrics["answerer_score"][1]) == pytest.approx(2 / 3)


def test_groups_of_several_games_do_not_mix(env):
    _, judged = play(env, ["5"], ["="], num_prompts=2, num_completions=2)
    assert judged.columns[columns.ROW_ID].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert judged.columns[columns.GROUP].tolist() == [0, 1, 0, 1, 2, 3, 2, 3]


def test_a_game_ends_at_its_limits_and_at_what_nobody_can_answer(env):
    attempts, judged = play(env, ["5"], ["<"])
    assert [a.conversation.num_turns for a in attempts] == [4, 4]
    assert [a.truncated for a in attempts] == ["turns", ""]
    assert judged.columns[columns.SCORES].tolist() == pytest.approx([-0.2, 1.0])
    attempts, judged = play(env, ["<"], ["<"])
    # The answerer was never asked: there is nothing of it to learn from.
    assert judged.columns[columns.VALID].tolist() == [True, False]
    assert judged.columns[columns.SCORES].tolist() == pytest.approx([-0.05, 0.0])


def test_reward_functions_judge_who_has_spoken():
    """The second player was told something at the end, and never asked."""
    env = Short(settings(reward_functions=lambda completions, **_: [len(c) for c in completions]))
    try:
        _, judged = play(env, ["Yes."], ["No."], num_prompts=2, num_completions=1)
    finally:
        env.close()
    assert judged.columns[columns.VALID].tolist() == [True, False] * 2
    assert judged.columns[columns.SCORES].tolist() == [1.5, 0.0] * 2


class Short(SelfPlayEnv):
    """Is over when the first player has spoken, and says so to the second."""

    def relay(self, player, game):
        return Response("It is over.", reward=0.5, done=True)


class Brittle(SelfPlayEnv):
    """Opens with two messages to the second player, and fails where its task says so."""

    def opening(self, player, game):
        return super().opening(player, game) if player == 0 else "You are the second."

    def relay(self, player, game):
        if game.task["answer"] == "4":
            raise KeyError("lost")
        return Response("Go on.", reward=1.0, done=player == 1)


def test_a_game_that_fails_costs_both_players_rows_and_no_others():
    env = Brittle(settings())
    with pytest.warns(UserWarning, match="4 of 8 conversations failed .* KeyError: 'lost'"):
        attempts, judged = play(env, ["Yes."], ["No."], num_prompts=2, num_completions=2)
    assert judged.columns[columns.VALID].tolist() == [True] * 4 + [False] * 4
    # What a user says in a row is one message.
    assert attempts[1].conversation.messages[0] == {
        **USER, "content": "You are the second.\nGo on."
    }  # fmt: skip
    env.close()


def test_the_checker_plays():
    assert check_env("rllib_llm/Guessing-v0", {"model": guessing.MODEL}) == []


# --- learning ------------------------------------------------------------------------------------


class Chatty(SelfPlayEnv):
    """Each player says something and earns the share of it that is digits."""

    players = ("asker", "answerer")

    def relay(self, player, game):
        said = game.conversation(player).reply.content
        reward = sum(letter.isdigit() for letter in said) / (1 + len(said))
        return Response("7:5", reward=reward, done=player == 1)


def config(kind=SelfPlayConfig, **self_play):
    env_config = {"prompts": [{"prompt": "?"}] * 9, "eval_fraction": 0.0}
    made = (
        kind()
        .language_model(model=guessing.MODEL)
        .environment(f"{__name__}:Chatty", env_config=env_config)
        # A random model ends its turn in about half of them, and the other player is asked.
        .sampling(max_new_tokens=24, num_completions=4, log_samples_every=0)
        .training(
            train_batch_size_per_learner=48,
            minibatch_size=None,
            num_epochs=1,
            lr=1e-2,
            ref_kl_coeff=0.0,
        )
    )
    return made.self_play(**self_play) if self_play else made


def weights_of(algorithm):
    modules = local_learner(algorithm.learner_group).module
    return {
        name: {key: tensor.clone() for key, tensor in modules[name].state_dict().items()}
        for name in (DEFAULT_MODULE_ID, OPPONENT)
    }


def differ(one, other):
    return any(not torch.equal(one[name], other[name]) for name in one)


def test_both_sides_learn_and_each_from_its_own_rows():
    with tiny.built(config()) as algorithm:
        module = local_learner(algorithm.learner_group).module
        assert set(module.keys()) == {DEFAULT_MODULE_ID, OPPONENT}  # RLlib's MultiRLModule
        before = weights_of(algorithm)
        assert not differ(before[DEFAULT_MODULE_ID], before[OPPONENT])
        seen = {}
        for name in before:
            seen[name] = watch(module[name].unwrapped())
        result = algorithm.train()
        after = weights_of(algorithm)
        for name in before:
            assert differ(before[name], after[name])
        assert differ(after[DEFAULT_MODULE_ID], after[OPPONENT])
        # "?" opens the asker's games, and a secret and a guess the answerer's.
        tokenizer = module[DEFAULT_MODULE_ID].unwrapped().tokenizer
        opened = {
            name: {tokenizer.decode(ids) for ids in prompts} for name, prompts in seen.items()
        }
        assert opened[DEFAULT_MODULE_ID] == {"<|user|>?<|end|><|assistant|>"}
        nobody = {"<pad>"}  # of a game that was over before the answerer was asked
        assert opened[OPPONENT] - nobody == {"<|user|>7:5<|end|><|assistant|>"}
        learners, count = result["learners"], "num_trainable_parameters"
        nums = {name: sum(p.numel() for p in module[name].parameters()) for name in before}
        assert {name: learners[name][count] for name in nums} == nums
        assert learners["__all_modules__"][count] == sum(nums.values())
        assert {"asker_score", "answerer_score"} <= result["env"].keys()
        assert result["val"]["ratio"] == pytest.approx(1.0, abs=1e-5)  # of both, on policy


def watch(module):
    """The prompts of all rows that a module's forward pass in training is given."""
    prompts = []
    inner = module.forward_train

    def forward_train(batch, **options):
        rows = zip(batch[columns.PROMPT_IDS], batch[columns.PROMPT_MASK], strict=True)
        prompts.extend(ids[mask].tolist() for ids, mask in rows)
        return inner(batch, **options)

    module.forward_train = forward_train
    return prompts


def test_a_frozen_opponent_stays_and_may_be_given_the_policy_s_weights():
    with tiny.built(config(opponent="frozen", opponent_every=2)) as algorithm:
        before = weights_of(algorithm)
        algorithm.train()
        first = weights_of(algorithm)
        assert differ(before[DEFAULT_MODULE_ID], first[DEFAULT_MODULE_ID])
        assert not differ(before[OPPONENT], first[OPPONENT])
        algorithm.train()
        second = weights_of(algorithm)
        assert not differ(second[DEFAULT_MODULE_ID], second[OPPONENT])


def test_a_checkpoint_has_both_players(tmp_path):
    with tiny.built(config()) as algorithm:
        algorithm.train()
        expected = weights_of(algorithm)
        algorithm.save_to_path(str(tmp_path / "checkpoint"))
        algorithm.train()
        assert differ(weights_of(algorithm)[OPPONENT], expected[OPPONENT])
        algorithm.restore_from_path(str(tmp_path / "checkpoint"))
        restored = weights_of(algorithm)
    for name in expected:
        assert not differ(restored[name], expected[name])


def test_a_sampler_of_its_own_is_sent_the_weights_of_both():
    with tiny.built(config()) as algorithm:
        modules = [
            local_learner(algorithm.learner_group).module[name].unwrapped()
            for name in (DEFAULT_MODULE_ID, OPPONENT)
        ]
        algorithm.train()
        spec = algorithm.config.get_multi_rl_module_spec(
            spaces=algorithm.env_runner.get_spaces(), inference_only=True
        )
        makes = [spec.rl_module_specs[name].build for name in (OPPONENT, DEFAULT_MODULE_ID)]
        policy = PlayersPolicy(*makes, alias=True, is_pretrained=False)
        published = pack(TwoModules(*modules).published_state())
        policy.load(published)
        assert policy.differing(published) == []
        for loaded, module in zip((policy, policy.opponent), modules, strict=True):
            assert not differ(loaded.module.published_state(), module.published_state())
        algorithm.train()
        changed = pack(TwoModules(*modules).published_state())
        assert {name.startswith("opponent/") for name in policy.differing(changed)} == {True, False}


@pytest.mark.slow  # an actor
@pytest.mark.parametrize("opponent", [{}, {"opponent": "frozen", "opponent_every": 1}])
def test_samplers_of_their_own_give_what_the_driver_s_gives(opponent):
    learnt = []
    for num_samplers in (0, 1):
        made = config(**opponent).env_runners(num_env_runners=num_samplers)
        with tiny.built(made) as algorithm:
            results = [algorithm.train() for _ in range(2)]
            if num_samplers:
                assert algorithm.verify_weights() == {}
            learnt.append((weights_of(algorithm), results[-1]["env"]["asker_score"]))
    (driver, score), (actor, other) = learnt
    assert score == pytest.approx(other, abs=1e-6)
    for name in driver:
        for key, tensor in driver[name].items():
            torch.testing.assert_close(actor[name][key], tensor, atol=1e-5, rtol=0)


def test_one_policy_may_play_and_learn_both_sides():
    with tiny.built(config(GRPOConfig)) as algorithm:
        assert {"asker_score", "answerer_score"} <= algorithm.train()["env"].keys()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_learners": 1}, "num_learners=1 must be 0"),
        ({"opponent": "human"}, "opponent='human' must be"),
        ({"opponent_model": guessing.MODEL, "ref_kl_coeff": 0.1}, "ref_kl_coeff=0.1 must be 0"),
    ],
)
def test_what_cannot_be_played_is_refused(changes, why):
    with pytest.raises(ValueError, match=why):
        config().update_from_dict(changes).validate()
