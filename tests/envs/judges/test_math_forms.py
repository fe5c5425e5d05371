"""Forms of answers with the verdict of a mathematician who reads gold and completion as a person
does: the last box is the answer, words are words, money and dates are what they look like."""

from __future__ import annotations

import pytest

pytest.importorskip("math_verify")

RIGHT = [
    # numbers
    ("7", r"\boxed{7}"), ("7", r"\boxed{7.}"), ("7", "7"), ("7", "The answer is 7."),
    ("7", "#### 7"),
    ("7", r"\boxed{ 7 }"), ("7", r"$\boxed{7}$"), ("7", r"\boxed{7.0}"), ("7", r"\[\boxed{7}\]"),
    ("7", "**Answer:** 7"), ("7", "Answer:\n7"), ("7", r"So $x = 7$."), ("7", r"\boxed{x = 7}"),
    ("-7", r"\boxed{-7}"), ("-7", "\\boxed{\u22127}"), ("-7", "The answer is \u22127."),
    ("\u22127", r"\boxed{-7}"), ("1234", r"\boxed{1\,234}"), ("1234", r"\boxed{1,234}"),
    ("1,234", r"\boxed{1234}"), ("1234", r"\boxed{1{,}234}"), ("1234", r"\boxed{1\!,234}"),
    ("1234567", r"\boxed{1,234,567}"), ("1234.5", r"\boxed{1,234.5}"), ("1,234", "#### 1234"),
    ("1234", r"\boxed{1 234}"), ("0", r"\boxed{0}"), ("0.5", r"\boxed{\frac{1}{2}}"),
    (r"\frac{1}{2}", r"\boxed{0.5}"), ("1/2", r"\boxed{\dfrac12}"), ("1/3", r"\boxed{0.333333}"),
    ("1e-7", r"\boxed{0.0000001}"), ("0.0000001", r"\boxed{10^{-7}}"), ("0.25", r"\boxed{25\%}"),
    # money and units
    ("18", r"\$18"), ("18", r"The answer is \$18."), ("18", r"\boxed{\$18}"),
    ("18", "It costs $18."),
    (r"\$18.90", r"\boxed{18.90}"), (r"\$18.90", r"The answer is \$18.90."),
    ("$18.90", r"\boxed{18.9}"),
    (r"\$1,000", r"\boxed{1000}"), ("18", r"\boxed{18\text{ cm}}"), ("18", r"$\boxed{\$18}$"),
    # expressions, sets, intervals
    ("(x+1)^2", r"\boxed{x^2+2x+1}"), (r"\sqrt{8}", r"\boxed{2\sqrt{2}}"), ("xy", r"\boxed{yx}"),
    (r"\{1,2\}", r"\boxed{\{2,1\}}"), ("(1,2)", r"\boxed{(1,2)}"), (r"\pi", r"\boxed{\pi}"),
    ("[0,1]", r"\boxed{[0,1]}"), ("x", r"\boxed{x}"), (r"$\frac{\pi}{2}$", r"\boxed{\pi/2}"),
    (r"2^{10}", r"\boxed{1024}"), ("x=3", r"\boxed{3}"), (r"\frac{a}{b}", r"\boxed{\frac{a}{b}}"),
    # without a box, and signs of Unicode
    ("1024", "2^{10}"), ("1024", "The answer is 2^{10}."), ("2", r"#### \sqrt{4}"), ("7", "x = 7"),
    ("1/2", "\u00bd"), ("\u00bd", r"\boxed{0.5}"), ("5/2", "2\u00bd"), ("12", "\uff11\uff12"),
    ("x^2", "x\u00b2"), ("1024", "2\u00b9\u2070"), ("(1,2)", "(1, 2)"),
    ("18", "The answer is **18**."), ("18", "#### **18**"), ("18", "18!"), ("18", "- 18"),
    ("18", "18,"), ("18", "16 - 3 = 13, 13 + 5 = 18"),
    # which box
    ("6", r"\boxed{5}, no: \boxed{6}"), ("6", r"\boxed{5} hm. The box: $\boxed{6}$"),
    ("6", r"In all \boxed{6}. I used 3 steps."), ("7", r"It is so. \boxed{7}"),
    # words
    ("Paris", r"\boxed{Paris}"), ("Paris", "paris."), ("Paris", r"\boxed{\text{Paris}}"),
    ("Paris", "The answer is Paris."), ("New York", r"\boxed{new york}"), ("No", r"\boxed{no}"),
    ("yes", "Answer: Yes"), ("ABC", r"\boxed{ABC}"),
    ("Paris", "**Paris**"), (r"\text{even}", r"\boxed{even}"),
    ("Monday, Tuesday", r"\boxed{Monday, Tuesday}"),
    # choices
    ("B", "(B) because it is so."), ("B", "The answer is (B)."), ("(B)", r"\boxed{B}"), ("B", "B."),
    ("B", r"\boxed{\text{(B)}}"), ("B", "(b)"), ("B", "The answer is B because 2 > 1."),
    ("(B)", r"\boxed{\textbf{(B)} 42}"),
    # dates, times, ratios
    ("2024-01-02", r"\boxed{2024-01-02}"), ("2024-01-02", "The answer is 2024-1-2."),
    ("12:00", r"\boxed{12:00}"), ("3:45", r"\boxed{3:45}"), ("3:45", "It ends at 3:45."),
    ("3:45", "03:45"),
    ("3:45", r"\boxed{3:45 \text{ PM}}"), ("1/2/2024", r"\boxed{1/2/2024}"),
    ("2:3", r"\boxed{2:3}"),
]  # fmt: skip
WRONG = [
    ("7", r"\boxed{8}"), ("7", ""), ("7", "I do not know."), ("7", r"\boxed{-7}"),
    ("-7", r"\boxed{7}"),
    ("-7", "7"), ("7", "1 2 7 8"), ("7", r"\boxed{7} hm, \boxed{8}"),
    ("7", r"\boxed{7} hm, \boxed{8"),
    ("7", r"\boxed{7"), ("7", r"\boxed{}"), ("5", r"\boxed{5}, no: \boxed{6}"),
    ("7", r"\boxed{17}"), ("2^{11}", "2^{10}"), ("1/2", "\u00bc"), ("13", "\uff11\uff12"),
    ("10", "2^{10}"),
    ("1234", r"\boxed{1.234}"), ("1234", r"\boxed{1,235}"), ("0.0000001", r"\boxed{0.0000002}"),
    ("1e-7", r"\boxed{2 \cdot 10^{-7}}"), ("0", r"\boxed{0.0000001}"), ("0.0000001", r"\boxed{0}"),
    ("1/3", r"\boxed{0.33}"), ("0.5", r"\boxed{0.51}"), (r"\$18.90", r"\boxed{18.80}"),
    ("18", r"\$81"),
    (r"\$18", "The answer is 19."), ("(x+1)^2", r"\boxed{x^2+1}"),
    (r"\sqrt{8}", r"\boxed{\sqrt{2}}"),
    (r"\{1,2\}", r"\boxed{\{1,3\}}"), ("(1,2)", r"\boxed{(2,1)}"),
    ("[0,1]", r"\boxed{(0,1)}"), ("x", r"\boxed{y}"),
    ("Paris", r"\boxed{Pairs}"), ("Paris", "London"), ("Paris", "not Paris"),
    ("ABC", r"\boxed{BAC}"),
    ("Paris", r"Paris? No: \boxed{London}"), ("No", r"\boxed{on}"), ("listen", r"\boxed{silent}"),
    ("Monday, Tuesday", r"\boxed{Monday}"), ("yes", "The answer is no."),
    ("Paris", "The answer is not Paris."),
    ("B", "(A) because (B) is wrong"), ("B", r"\boxed{C}"), ("B", "(B) or (C)"),
    ("B", r"\boxed{A, B}"), ("B", ""),
    ("2024-01-02", "2021"), ("2024-01-02", r"\boxed{2021}"), ("2024-01-02", r"\boxed{2024-02-01}"),
    ("12:00", r"\boxed{12}"), ("3:45", r"\boxed{3:54}"), ("3:45 PM", r"\boxed{3:45 AM}"),
    ("2:3", r"\boxed{3:2}"),
    ("12:00", r"\boxed{12:00:30}"), ("1/2/2024", r"\boxed{2/1/2024}"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("gold", "completion", "verdict"),
    [(*row, 1.0) for row in RIGHT] + [(*row, 0.0) for row in WRONG],
)
def test_the_verdict_of_a_mathematician(gold, completion, verdict):
    from rllib_llm.envs.judges.math_check import check

    assert check(completion, gold) == verdict
