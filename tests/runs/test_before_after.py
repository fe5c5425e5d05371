from __future__ import annotations

import io

from rich.console import Console

from rllib_llm.runs.report import MAX_CHARS, before_after_table


def row(prompt: str, completion: str, **values: float) -> dict:
    return {"prompt": prompt, "completion": completion, **values}


def rendered(pairs: list, **kwargs: int) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(before_after_table(pairs, **kwargs))
    return console.file.getvalue()


def test_both_completions_stand_side_by_side_with_their_scores():
    before = row("My tent", " leaks [badly].", score=-1.0, gold_score=-3.0)
    text = rendered([(before, row("My tent", "", score=2.345))])
    assert "My tent" in text
    assert "leaks [badly]." in text  # brackets are text, not markup
    assert "score -1.00  gold score -3.00" in text
    assert "(nothing)" in text and "score 2.35" in text or "score 2.34" in text


def test_of_a_chat_the_user_s_words_are_shown():
    before = row("[system] Be brief.\n[user] 1+1?", "3", question="1+1?")
    text = rendered([(before, row(before["prompt"], "2"))])
    assert "1+1?" in text and "Be brief" not in text


def test_long_texts_are_cut_and_prompts_spread_over_the_set():
    pairs = [(row(f"p{i}", "x " * 500), row(f"p{i}", "y")) for i in range(10)]
    text = rendered(pairs, num=2)
    assert "p0" in text and "p5" in text and "p1" not in text
    assert text.count("…") == 2
    assert text.count("x") <= MAX_CHARS
