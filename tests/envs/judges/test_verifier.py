"""Mathematical answers: equal in any form, never 0 for what failed."""

from __future__ import annotations

import threading

import pytest

from rllib_llm.envs.judges.remote_rewards import MathVerify
from rllib_llm.envs.judges.rewards import Invalid
from tests.containment import needs_bwrap

pytest.importorskip("math_verify")
pytestmark = needs_bwrap


@pytest.fixture(scope="module")
def judge():
    verifier = MathVerify(num_workers=1, deadline_s=5.0)
    yield verifier
    verifier._pool.close()


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        (r"So it is $\frac{2}{4}$.", r"\frac{1}{2}", 1.0),
        ("The answer is 0.5", "1/2", 1.0),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
        (r"\boxed{\{2, 1\}}", r"$\{1,2\}$", 1.0),
        ("He has 72 apples.", "48/2=24, so 48+24=72\n#### 72", 1.0),
        (r"\boxed{41}", "42", 0.0),
        ("I do not know.", "42", 0.0),  # the policy's own fault
        ("1 2 3 4 42 43", "42", 0.0),  # the right one among many is no answer
    ],
)
def test_answers(judge, completion, answer, score):
    assert judge([completion], answer=[answer]) == [score]


def test_a_right_answer_that_cannot_be_read_is_not_the_policys_fault(judge):
    unread, absent, right = judge(["4"] * 3, answer=["", None, 4])
    assert isinstance(unread, Invalid) and "must be readable" in unread.reason
    assert absent is None and right == 1.0


def test_off_the_main_thread_answers_are_the_same(judge):
    """verl #5635, TRL #5281: SIGALRM off the main thread made every score 0."""
    found = []
    thread = threading.Thread(target=lambda: found.extend(judge(["0.5"], answer=["1/2"])))
    thread.start()
    thread.join(60)
    assert found == [1.0]


def test_an_answer_that_is_never_computed_ends_at_the_deadline():
    """9**9**9**9 has more digits than there are atoms: math-verify computes it without end."""
    judge = MathVerify(num_workers=1, deadline_s=1.0)
    (hung,) = judge([r"\boxed{9^{9^{9^{9}}}}"], answer=[r"8^{8^{8^{8}}}"])
    assert hung == 0.0 or isinstance(hung, Invalid)
    judge._pool._deadline_s = 60.0  # however slow the machine is
    assert judge(["7"], answer=["7"]) == [1.0]
    judge._pool.close()


def test_a_missing_column_is_named(judge):
    with pytest.raises(ValueError, match="answer_column='answer' must be a column .*'solution'"):
        judge(["4"], solution=["4"])
