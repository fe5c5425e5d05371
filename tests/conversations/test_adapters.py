"""What others have written, unchanged: TRL's environments and tools, reasoning-gym's data sets."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import itertools
import pickle
import signal
import sqlite3
import threading
import time

import datasets
import pytest
import torch

from rllib_llm.envs.adapters.trl import TRLEnv
from rllib_llm.envs.judges.rewards import Invalid, RewardError, UnjudgedError
from rllib_llm.envs.sandbox import WorkerPool
from rllib_llm.envs.sandbox_backends import bwrap_refused
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems
from tests.conversations.scripted import add, roll, settings


class Guess:
    """After TRL's guide: reset(**row), public methods as tools, get_reward()."""

    def reset(self, **row) -> str | None:
        self.secret, self.guesses = int(row["answer"]), 0
        return f" You have {row['tries']} tries."

    def guess(self, number: int) -> str:
        """
        Guesses the number.

        Args:
            number: The guess.

        Returns:
            Whether the number is higher, lower or right.
        """
        self.guesses += 1
        self.right = number == self.secret
        return "right" if self.right else "higher" if number < self.secret else "lower"

    def get_reward(self) -> float:
        return float(self.right) / self.guesses


def reward_guesses(completions, environments, **kwargs):
    """A TRL reward function that asks its environments."""
    assert [c[0]["role"] for c in completions] == ["assistant"] * len(completions)
    return [0.1 * environment.guesses for environment in environments]


def nothing(completions, **kwargs):
    return [0.0] * len(completions)


def call(number):
    return f'<tool_call>{{"name": "guess", "arguments": {{"number": {number}}}}}</tool_call>'


@pytest.fixture
def make():
    made = []

    def build(**changes):
        rows = [
            {"prompt": "Guess.", "answer": "3", "tries": 2},
            {"prompt": [{"role": "user", "content": "Go."}], "answer": "4", "tries": 9},
        ]
        made.append(TRLEnv(settings(**{"prompts": rows, **changes})))
        return made[-1]

    yield build
    for env in made:
        env.close()


def test_an_environment_of_trl_as_it_is(make):
    env = make(environment_factory=Guess, reward_functions=reward_guesses)
    attempts, judged, policy = roll(
        env, call(3), lambda row: call(4) if row > 1 else "Done.", "Done."
    )
    # The first two guess 3 of 3 at once; the others 3, then 4 of 4.
    assert judged.columns[columns.SCORES].tolist() == pytest.approx([1.1, 1.1, 0.7, 0.7])
    assert judged.components["score"].tolist() == [1, 1, 0.5, 0.5]
    asked = policy.asked()
    assert "Guess. You have 2 tries.<|im_end|>" in asked and '"name": "guess"' in asked
    said = [m["content"] for m in attempts[2].conversation.messages if m["role"] == "tool"]
    assert said == ["higher", "right"]
    assert "Go. You have 9 tries." in policy.asked(2, 2)


def test_tools_of_trl_as_they_are(make):
    env = make(tools=[add], reward_functions=lambda completions, **kwargs: [1.0] * len(completions),
               max_tool_calling_iterations=2)  # fmt: skip
    assert env.settings["max_turns"] == 3
    add_call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    attempts, _, _ = roll(env, add_call)
    assert {a.truncated for a in attempts} == {"turns"}
    assert attempts[0].conversation.num_turns == 3
    said = [message["role"] for message in attempts[0].conversation.messages]
    assert said == ["user"] + ["assistant", "tool"] * 2 + ["assistant"]  # TRL runs tools twice


class Ledger:
    """An environment with what TRL allows: a static tool, a property, a data source of its own."""

    made = 0

    def __init__(self, start: int = 0):
        type(self).made += 1
        self.start, self.entries, self.right = start, [], None

    @property
    def broken(self):
        raise RuntimeError("nobody asked")

    def reset(self, **kwargs):
        # Where there is no data set; rows without a prompt have none here either.
        assert kwargs.get("prompt") in (None, [{"role": "user", "content": ""}])
        return [{"type": "text", "text": f"Begin at {self.start}."}]

    def push(self, number: int) -> dict:
        """
        Writes a number down.

        Args:
            number: What to write.
        """
        time.sleep(0.05 / (1 + number))  # the later ones are quicker
        self.entries.append(number)
        return {"entries": len(self.entries)}

    @staticmethod
    def double(number: int) -> int:
        """
        Doubles a number.

        Args:
            number: What to double.
        """
        return 2 * number

    @classmethod
    def beginning_at(cls, start):  # another way to make one: no tool to TRL 1.16
        return cls(start)

    @functools.lru_cache  # noqa: B019  (no function to TRL, either)
    def quadruple(self, number):
        return 4 * number

    async def get_reward(self) -> float:
        return float(self.entries == sorted(self.entries))


def calls(*numbers, tool="push"):
    return "".join(
        f'<tool_call>{{"name": "{tool}", "arguments": {{"number": {n}}}}}</tool_call>'
        for n in numbers
    )


FACTORIES = {
    "class": Ledger, "lambda": lambda: Ledger(), "partial": functools.partial(Ledger, 3),
    "path": "tests.conversations.test_adapters:Ledger",
}  # fmt: skip


@pytest.mark.parametrize("kind", FACTORIES)
def test_an_environment_that_owns_its_data_and_its_calls_in_order(make, kind):
    """TRL's first example has no data set; the calls of a turn are made in their order."""
    env = make(prompts=None, environment_factory=FACTORIES[kind], num_tasks=10)
    assert {*env.toolbox.tools} == {"push", "double"}
    double = calls(4, tool="double")
    attempts, judged, policy = roll(env, calls(0, 1, 2, 3, 4), double, "Done.")
    assert judged.columns[columns.SCORES].tolist() == [1.0] * 4
    assert len(env.tasks) == 10
    begun = policy.asked()
    assert ("Begin at 3." if kind == "partial" else "Begin at 0.") in begun
    said = [m["content"] for m in attempts[0].conversation.messages if m["role"] == "tool"]
    assert said == [*(f"{{'entries': {n}}}" for n in range(1, 6)), "8"]  # as TRL has it


class Shelf:
    """Holds what only the thread may use that made it."""

    def __init__(self):
        self.connection = sqlite3.connect(":memory:")

    def reset(self, **row):
        self.connection.execute("create table books (number int)")

    def push(self, number: int) -> str:
        """
        Adds a book.

        Args:
            number: of the book.
        """
        self.connection.execute("insert into books values (?)", (number,))
        return str(self.connection.execute("select sum(number) from books").fetchone()[0])

    def get_reward(self):
        return float(self.connection.execute("select count(*) from books").fetchone()[0])


def num_calling():
    return sum(thread.name == "conversation-call" for thread in threading.enumerate())


def test_an_environment_lives_in_one_thread(make):
    """Each call had a thread of its own, and SQLite refuses those that did not make a connection:
    the policy was told so as if it had done something."""
    env = make(prompts=None, environment_factory=Shelf)
    before = num_calling()
    attempts, judged, _ = roll(env, calls(1, 2), calls(4), "Done.")
    assert judged.columns[columns.SCORES].tolist() == [3.0] * 4
    said = [m["content"] for m in attempts[0].conversation.messages if m["role"] == "tool"]
    assert said == ["1", "3", "7"]
    del attempts, judged
    gc.collect()
    for _ in range(1000):
        if num_calling() <= before:
            break
        time.sleep(0.01)
    assert num_calling() <= before  # with its conversation the thread ends


def test_a_call_that_is_late_holds_up_none_of_the_next(make):
    env = make(prompts=None, environment_factory=Patient, tool_timeout_s=0.2)
    attempts, _, _ = roll(env, calls(9), calls(2), "Done.", num_prompts=1, num_completions=1)
    said = [m["content"] for m in attempts[0].conversation.messages if m["role"] == "tool"]
    assert said == ["Error: no answer within 0.2 s", "2"]


class Patient:
    """Hangs at nine until it is let go."""

    def __init__(self):
        self.goes_on = threading.Event()

    def reset(self, **row):
        return "Begin."

    def push(self, number: int) -> str:
        """
        Pushes.

        Args:
            number: what.
        """
        if number == 9:
            self.goes_on.wait(60)
        self.goes_on.set()
        return str(number)

    def get_reward(self):
        return 1.0


@pytest.mark.parametrize("most", [-1, 2.5])
def test_the_name_that_was_given_is_told(make, most):
    """-1 was called a wrong max_turns."""
    with pytest.raises(Problems, match=f"max_tool_calling_iterations={most} must be"):
        make(max_tool_calling_iterations=most)


def logs(completions, log_metric, **columns):
    """A reward function that cannot do without what TRL gives it to log with."""


def test_a_reward_function_that_wants_what_there_is_not_is_refused_at_start(make):
    """It failed when the first conversations were over."""
    with pytest.raises(RewardError, match=r"arguments \['log_metric'\] among the columns"):
        make(reward_functions=logs)


def test_rows_choose_among_environments(make):
    """Each prompt shows the tools of its own environment alone."""
    rows = [
        {"prompt": "Guess.", "answer": "3", "tries": 2, "environment": "guess"},
        {"environment": "ledger"},
    ]
    env = make(prompts=rows, environment_factory={"guess": Guess, "ledger": Ledger})
    attempts, judged, policy = roll(env, lambda row: call(3) if row < 2 else calls(2, 1), "Done.")
    assert judged.columns[columns.SCORES].tolist() == [1.0, 1.0, 0.0, 0.0]
    guess, ledger = policy.asked(0), policy.asked(2)
    assert '"name": "guess"' in guess and '"name": "push"' not in guess
    assert '"name": "push"' in ledger and '"name": "guess"' not in ledger
    with pytest.raises(Problems, match="environment of a row='chess' must be one of"):
        roll(make(prompts=[{"prompt": "x", "environment": "chess"}],
                  environment_factory={"guess": Guess}), "x", num_prompts=1)  # fmt: skip


class Strict:
    """Takes the columns of its data set and nothing else."""

    def reset(self, answer, tries=0):
        self.answer = answer
        return f"Say {answer}."

    def get_reward(self) -> float:
        return float(self.answer == "3")


def test_a_data_set_that_only_routes(make):
    """TRL's example of several environments: rows have no prompt, and `reset` gets none."""
    rows = datasets.Dataset.from_dict({"environment": ["strict"] * 2, "answer": ["3", "4"]})
    env = make(prompts=rows, environment_factory={"strict": Strict})
    _, judged, policy = roll(env, "Done.")
    assert judged.columns[columns.SCORES].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert "user\nSay 3.<|im_end|>" in policy.asked()


def test_reset_gets_the_columns_of_the_data_set_alone(make):
    rows = [{"answer": "3", "tries": 1}, {"answer": "4"}]
    _, judged, _ = roll(make(prompts=rows, environment_factory=Strict), "Done.")
    assert judged.columns[columns.SCORES].tolist() == [1.0, 1.0, 0.0, 0.0]


def test_reward_functions_of_several_environments_leave_out_what_is_not_theirs(make):
    """They return None, which adds nothing."""
    rows = [{"answer": "3"}, {"answer": "4"}]

    def twice(environments, **kwargs):
        return [2.0 if each.answer == "4" else None for each in environments]

    env = make(prompts=rows, environment_factory=Strict, reward_functions=twice)
    _, judged, _ = roll(env, "Done.")
    assert judged.columns[columns.SCORES].tolist() == [1.0, 1.0, 2.0, 2.0]


@contextlib.contextmanager
def limited(seconds: int):
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(seconds)
    yield


def slow(number: int) -> int:
    """
    Takes its time.

    Args:
        number: What to return.
    """
    with limited(1):
        return number


class Sneaky:
    """Hides what it does with signals."""

    def reset(self, **row):
        return None

    def limit(self, number: int) -> int:
        """
        Sets an alarm.

        Args:
            number: What to return.
        """
        getattr(signal, "sig" + "nal")(signal.SIGINT, signal.SIG_DFL)
        return number


def test_tools_that_want_the_main_thread_are_refused(make):
    with pytest.raises(Problems, match="tool 'slow' must not use 'SIGALRM'"):
        make(tools=[slow])
    env = make(environment_factory=Sneaky, reward_functions=lambda completions, **_: [1.0] * 4)
    with pytest.raises(UnjudgedError, match="signal only works in main thread"):
        roll(env, calls(1, tool="limit"), "Done.")


@pytest.mark.parametrize(
    "begun", [[{"type": "image", "image": b""}], [{"role": "user", "content": "Go."}], 3]
)
def test_what_is_no_text_begins_no_conversation(make, begun):
    """Messages are not taken by TRL either; as a prompt they would be their own repr."""
    environment = type("Begun", (Sneaky,), {"reset": lambda self, **row: begun})
    with pytest.raises(UnjudgedError, match=r"reset\(\) must give text, not"):
        roll(make(environment_factory=environment), "x")


class Shared(Sneaky):
    @classmethod
    def reset(cls, **row):
        return " Begin."


def test_reset_may_be_of_the_class(make):
    attempts, _, _ = roll(make(environment_factory=Shared, reward_functions=nothing), "x")
    assert attempts[0].conversation.messages[0]["content"] == "Guess. Begin."


class Camera(Sneaky):
    def limit(self, number: int) -> list:
        """
        Takes a picture.

        Args:
            number: Of the camera.
        """
        return [{"type": "image", "image": b""}]


def test_a_tool_that_returns_a_picture_is_not_the_policy_s_mistake(make):
    env = make(environment_factory=Camera, reward_functions=lambda completions, **_: [1.0] * 4)
    with pytest.raises(UnjudgedError, match="tool 'limit' must give text.*reads no images"):
        roll(env, calls(1, tool="limit"), "Done.")


def test_an_environment_without_reset_is_refused(make):
    with pytest.raises(Problems, match=r"must make objects with reset\(\*\*row\)"):
        make(environment_factory=dict)


def test_an_environment_that_wants_arguments_is_refused_by_name(make):
    class Board(Shared):
        def __init__(self, size, level=1):
            self.size = size

    with pytest.raises(Problems, match=r"must be callable without arguments.*\['size'\]"):
        make(environment_factory=Board)
    make(environment_factory=functools.partial(Board, 3))


@pytest.mark.parametrize("error", [RuntimeError("no licence"), SystemExit(3)], ids=repr)
def test_a_factory_that_raises_is_told_with_its_setting(make, error):
    """It was a raw traceback, and SystemExit ended the process."""

    def board():
        raise error

    with pytest.raises(Problems) as caught:
        make(environment_factory=board)
    assert caught.value.problem.name == "env_config.environment_factory"
    told = f"{type(error).__name__}: {error}, raised in test_adapters.py:"
    assert caught.value.problem.reason.startswith(told) and caught.value.__cause__ is error


def test_task_sets_of_verifiers_want_verifiers():
    from rllib_llm.envs.adapters.verifiers import VerifiersEnv

    if importlib.util.find_spec("verifiers") is not None:
        pytest.skip("verifiers is installed: test_verifiers.py")
    with pytest.raises(ImportError, match="needs verifiers"):
        VerifiersEnv({**settings(), "taskset": "x"})


# --- reasoning-gym -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gym():
    pytest.importorskip("reasoning_gym")
    from rllib_llm.envs.adapters import reasoning_gym

    return reasoning_gym


def test_a_task_is_a_function_of_seed_and_position(gym):
    mixture = ["chain_sum", {"name": "gcd", "weight": 3.0}]
    one, two = (gym.Tasks(mixture, num_tasks=200, seed=5) for _ in range(2))
    assert two[150] == one[150]  # in any order
    assert [one[i] for i in range(20)] == two[:20]
    assert gym.Tasks(mixture, num_tasks=200, seed=6)[150] != one[150]
    assert pickle.loads(pickle.dumps(one))[150] == one[150]
    names = [one[i]["dataset"] for i in range(200)]
    assert 120 <= names.count("gcd") <= 180  # three of four: 150 +- 5 standard deviations of 6


def test_a_task_is_made_once_and_not_again_for_its_scores(gym, scores, monkeypatch):
    """Some data sets search for seconds: task 11 of sokoban for two."""
    tasks = gym.Tasks("chain_sum", num_tasks=10)
    kind, made = type(tasks.dataset(0, 0)), []
    make_one = kind.__getitem__
    monkeypatch.setattr(kind, "__getitem__", lambda *of: made.append(of[1]) or make_one(*of))
    answers = {3: tasks[3]["answer"], 4: "nothing"}
    assert scores(tasks, answers)[0] == 1.0 and tasks[3]["answer"] == answers[3]
    assert sorted(made) == [3, 4]


@pytest.fixture(scope="module")
def scores(gym):
    """What answers to tasks are worth; all tests share the processes that score. Answers that may
    never end (`hostile`) have five seconds, others as long as a busy machine needs."""
    if bwrap_refused():
        pytest.skip(bwrap_refused())
    pools = {hostile: WorkerPool(gym.SCORE, isolated=True, deadline_s=5.0 if hostile else 300.0)
             for hostile in (False, True)}  # fmt: skip

    def judge(tasks, answers, *, hostile=False, **settings):
        scorer = gym.Scorer(tasks, pool=pools[hostile], **settings)
        return scorer(list(answers.values()), list(answers))

    yield judge
    for pool in pools.values():
        pool.close()


def test_what_holds_the_answer_is_worth_a_part_of_it_or_nothing(gym, scores):
    """By the data sets' own score; whoever wants nothing for it says so."""
    tasks = gym.Tasks("chain_sum", num_tasks=10)
    every = " ".join(map(str, range(-2000, 2000))) + f" {tasks[1]['answer']}"
    answers = {0: tasks[0]["answer"], 1: every}
    right, part = scores(tasks, answers)
    assert right == 1.0 and 0 < part < 0.01
    assert scores(tasks, answers, scoring="exact") == [1.0, 0.0]
    with pytest.raises(Problems, match="scoring='exakt' must be one of"):
        scores(tasks, answers, scoring="exakt")


@pytest.mark.slow
def test_what_a_model_writes_is_not_run_where_it_is_scored(gym, scores, tmp_path):
    """Data sets that evaluate answers, by `eval` and through sympy."""
    evaluating = [
        "string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "polynomial_equations",
        "simple_integration", "complex_arithmetic", "intermediate_integration",
    ]  # fmt: skip
    made = tmp_path / "made"
    for bad in (f"__import__('os').system('touch {made}')", "9**9**9**9"):
        tasks = gym.Tasks(evaluating, num_tasks=100)
        answers = {}
        for name in evaluating:
            index = next(i for i in range(100) if tasks[i]["dataset"] == name)
            answers[index] = bad
        found = scores(tasks, answers, hostile=True)
        assert all(0 <= score < 0.1 for score in found), dict(zip(evaluating, found, strict=True))
    assert not made.exists()


READ_BY_SYMPY = [
    "simple_integration", "intermediate_integration", "polynomial_multiplication", "countdown",
    "puzzle24",
]  # fmt: skip
FORGING = (
    """exec("import os\\nfor fd in range(3, 60):\\n"""
    """  try: os.write(fd, b'{\\\\"value\\\\": 1.0}\\\\n')\\n"""
    """  except OSError: pass")"""
)
NO_FORMULAS = [
    FORGING, "(lambda: 1)()", "[exec('1') for x in (1,)]", "x.__class__", "sin('exec(1)')",
    "eval('24')", "Symbol(eval('1'))",
]  # fmt: skip


def test_sympy_reads_formulas_alone(gym, scores):
    """What it makes of a text is run as Python: an answer wrote its own score into a pipe."""
    tasks = gym.Tasks(READ_BY_SYMPY, num_tasks=40)
    index = {}
    for i in range(40):  # until there is one of each: some are made for long
        if len(index) < 5:
            index.setdefault(tasks[i]["dataset"], i)
    chosen = index["simple_integration"]
    own = {i: tasks[i]["answer"] for i in index.values()}
    other = f"sqrt(4)/2*({own[chosen]}) + exp(0)*Abs(-3) + 2!".replace("C", "7")
    # The one that forges in each data set, the others in one: a process imports for each answer.
    assert scores(tasks, dict.fromkeys(own, FORGING)) == [0.0] * 5
    for place, bad in zip(itertools.cycle(own), NO_FORMULAS[1:]):
        assert scores(tasks, {place: bad}) == [0.0], bad
    assert scores(tasks, own) == [1.0] * 5
    assert scores(tasks, {chosen: other}) == [1.0]


@pytest.mark.slow
@pytest.mark.parametrize("bad", NO_FORMULAS)
def test_sympy_reads_no_code_in_any_data_set(gym, scores, bad):
    tasks = gym.Tasks(READ_BY_SYMPY, num_tasks=40)
    index = {tasks[i]["dataset"]: i for i in range(40)}
    assert [*index] and scores(tasks, dict.fromkeys(index.values(), bad)) == [0.0] * len(index)


class BusyPool:
    """Processes of a machine that is so busy at first that the first answer is late."""

    def __init__(self, late, scores):
        self.late, self.scores = late, scores

    def map(self, calls):
        late, self.late = self.late, set()
        return [
            Invalid("it is late")
            if call["answer"] in late or call["answer"] not in self.scores
            else self.scores[call["answer"]]
            for call in calls
        ]


def test_an_answer_that_was_late_once_is_no_wrong_answer(gym):
    """It scored 0 where the data set's own answer, scored after it, was in time."""
    tasks = gym.Tasks("chain_sum", num_tasks=4)
    own = [task["answer"] for task in tasks]
    known = {own[0]: 1.0, own[1]: 1.0, "near": 0.5}

    def score(late, *answers):
        pool = BusyPool(late, known)
        return gym.Scorer(tasks, pool=pool)(list(answers), range(len(answers)))

    assert score({own[0]}, own[0], own[1]) == [1.0, 1.0]
    assert score({"near"}, "near", "endless") == [0.5, 0.0]  # late again, and `own` is not
    (unjudged,) = gym.Scorer(tasks, pool=BusyPool(set(), known))(["endless"], [2])
    assert isinstance(unjudged, Invalid)  # as `own` of that task is late as well


def test_no_answer_computes_its_own_score(gym, scores):
    tasks = gym.Tasks("n_queens", num_tasks=4)
    forged = "setattr(type(self), 'score_answer', lambda *a: 1.0) or __import__('os')._exit(0)"
    assert scores(tasks, {0: forged, 1: "nothing", 2: tasks[2]["answer"]}) == [0.0, 0.0, 1.0]


@pytest.mark.slow  # a hundred data sets
@pytest.mark.filterwarnings("ignore:.*gives its full score")
def test_answers_to_all_data_sets(gym, scores, tmp_path):
    from reasoning_gym.factory import DATASETS

    names = sorted(set(DATASETS) - {"composite"})
    assert len(names) >= 105
    tasks = gym.Tasks(names, num_tasks=4000)
    first = {}
    for index, which in enumerate(tasks._which.tolist()):
        first.setdefault(which, index)
    rows = {index: tasks[index] for index in first.values()}
    solved = {index: row["answer"] for index, row in rows.items() if row["answer"] is not None}
    worth = scores(tasks, solved)
    wrong = {rows[i]["dataset"]: s for i, s in zip(solved, worth, strict=True) if s != 1.0}
    assert not wrong
    unsolved = {rows[i]["dataset"] for i in rows if i not in solved}
    assert unsolved <= {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
    made = tmp_path / "made"
    hostile = (
        f"__import__('os').system('touch {made}')", f"open('{made}', 'w')", "a" * 100_000,
        "-98765 " * 14_000, "[" * 50_000, "(" * 20_000 + "1" + ")" * 20_000, "{" * 50_000,
        "-Infinity", "-98765.4321", "\x00", "\ud800", "," * 50_000,
    )  # fmt: skip
    for bad in ("None", "", "garbage of a policy", "[1, 2", "nan", *hostile):
        worth = scores(tasks, dict.fromkeys(rows, bad))
        found = {rows[i]["dataset"]: s for i, s in zip(rows, worth, strict=True)}
        liked = {name for name, score in found.items() if not 0 <= score <= 0.5}
        assert liked <= {"game_of_life_halting"}, (bad, liked)  # any text is right to it
    assert not made.exists()
    # A sentence that holds the answer is worth no more than the data set itself gives for it.
    told = {i: f"I think that the answer is {answer}, or so." for i, answer in solved.items()}
    for (i, text), score in zip(told.items(), scores(tasks, told), strict=True):
        which, entry = tasks.entry(i)
        own = 0.0  # where the data set cannot read it
        with contextlib.suppress(ValueError):
            own = tasks.dataset(which, 0).score_answer(text, entry)
        assert score <= own, rows[i]["dataset"]  # sympy reads no sentences here


def test_a_task_s_record_is_one_s_own(gym):
    """A scorer that writes into it changed the task for all others."""
    tasks = gym.Tasks("chain_sum", num_tasks=2)
    task, packed = tasks[1], tasks.packed(1)
    _, entry = tasks.entry(1)
    entry["answer"] = "-1"
    entry["metadata"].clear()
    assert tasks.entry(1)[1]["metadata"] and tasks.entry(1)[1]["answer"] == task["answer"] != "-1"
    assert (tasks[1], tasks.packed(1)) == (task, packed)


def test_a_data_set_that_likes_any_answer_is_named(gym):
    with pytest.warns(UserWarning, match="'game_of_life_halting' gives its full"):
        gym.Tasks("game_of_life_halting", num_tasks=2)


def test_a_curriculum_grows_with_the_position(gym):
    tasks = gym.Tasks("chain_sum", num_tasks=30, tasks_per_level=10)
    easy, hard = (tasks.dataset(0, level).config for level in (0, 2))
    assert (easy.max_terms, easy.max_digits) < (hard.max_terms, hard.max_digits)
    assert tasks.level(9) == 0 and tasks.level(25) == 2


@pytest.mark.parametrize("name", ["rearc", "arc_agi"])
def test_curricula_with_settings_within_settings(gym, name):
    tasks = gym.Tasks(name, num_tasks=2, tasks_per_level=1)
    assert tasks[1]["prompt"]


def test_levels_that_make_no_task_are_refused_at_once(gym):
    with pytest.raises(
        Problems, match="level 2 of its curriculum.*rotation must be in range"
    ):
        gym.Tasks("caesar_cipher", num_tasks=30, tasks_per_level=10)
    gym.Tasks("caesar_cipher", num_tasks=20, tasks_per_level=10)
    fixed = {"name": "caesar_cipher", "config": {"max_rotation": 25}}
    gym.Tasks([fixed], num_tasks=30, tasks_per_level=10)


@pytest.mark.parametrize(
    ("datasets", "why"),
    [
        ("chain", "datasets.name='chain' must be one of"),
        ([], r"datasets=\[\] must name a data set"),
        ([{"name": "gcd", "weight": "x"}], "datasets.weight='x' must be a number above 0"),
        ([{"name": "gcd", "weight": 0}], "datasets.weight=0 must be"),
        ([{"name": "gcd", "config": 3}], "datasets.config=3 must be a mapping"),
        ([{"name": "gcd", "config": {"seed": 3}}], "tasks_seed and num_tasks"),
        ([{"name": "gcd", "wieght": 3}], "datasets=.*'wieght'.* must have name, weight, config"),
        (
            [{"name": "chain_sum", "config": {"max_terms": "x"}}],
            "config={'max_terms': 'x'} must be",
        ),
    ],
)
def test_unknown_data_sets_are_refused(gym, datasets, why):
    with pytest.raises(Problems, match=why):
        gym.Tasks(datasets)


def test_a_curriculum_wants_one(gym):
    from reasoning_gym.factory import CURRICULA, DATASETS

    name = min(set(DATASETS) - set(CURRICULA) - {"composite"})
    with pytest.raises(Problems, match="must be None for"):
        gym.Tasks(name, tasks_per_level=5)


def test_answers_that_nobody_knows(gym):
    assert gym.Tasks("rush_hour", num_tasks=2)[0]["answer"] is None
    with pytest.raises(Problems, match="must have a data set with answers"):
        gym.sft_texts("rush_hour", num_tasks=2)


def test_the_environment_judges_tagged_answers(gym):
    env = gym.create(
        {**{k: v for k, v in settings().items() if k == "tokenizer"}, "datasets": "chain_sum",
         "answer_tag": "answer", "max_prompt_len": 400, "num_tasks": 50}
    )  # fmt: skip
    _, infos = env.reset(options={"position": 0, "num_prompts": 2})
    answers = [env.prompts.row(int(i)).columns["answer"] for i in infos["prompt_index"]]
    texts = [f"so <answer>{answers[0]}</answer>", answers[1]]
    ids = [env.tokenizer(text)["input_ids"] for text in texts]
    _, rewards, _, _, infos = env.step(ids)
    assert rewards.tolist() == [1.0, 0.0] and bool(infos["valid"].all())
    assert isinstance(rewards, torch.Tensor)


def test_files_of_rows_need_no_prompt_either(make, tmp_path):
    """As lists and data sets of the same rows; held-out ones, too."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"answer": "3", "tries": 2}\n{"answer": "4", "tries": 1}\n')
    for source in (str(path), [str(path)]):
        env = make(prompts=source, environment_factory=Guess)
        attempts, judged, _ = roll(env, call(3), "Done.", num_prompts=1, num_completions=1)
        assert attempts[0].conversation.messages[0]["content"].startswith(" You have")
    held_out = make(prompts=str(path), eval_prompts=str(path), split="eval",
                    environment_factory=Guess)  # fmt: skip
    assert held_out.tasks.row(1).prompt == [{"role": "user", "content": ""}]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"num_tasks": 0}, "num_tasks=0 must be a whole number of at least 1"),
        ({"num_tasks": "many"}, "num_tasks='many' must be"),
        ({"seed": -1}, "tasks_seed=-1 must be a whole number of at least 0"),
        ({"tasks_per_level": 0}, "tasks_per_level=0 must be"),
    ],
)
def test_numbers_of_tasks_that_are_none_are_refused(gym, settings, why):
    with pytest.raises(Problems, match=why):
        gym.Tasks("chain_sum", **settings)
