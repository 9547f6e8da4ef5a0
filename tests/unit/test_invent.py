"""Invented prompts are different from each other, and as many as wanted where that can be had."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from draftsmith.inference.load_target import load
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.target import Target
from draftsmith.train import invent as invention
from draftsmith.train.answers import Settings
from draftsmith.train.invent import different, invent


def words(text: str) -> set[tuple[str, str]]:
    return set(itertools.pairwise(text.lower().split()))


def naive(texts: list[str], similarity: float) -> list[bool]:
    """Every text against every kept one."""
    kept: list[set[tuple[str, str]]] = []
    out = []
    for mine in map(words, texts):
        out.append(all(len(mine & other) / len(mine | other) < similarity for other in kept))
        if out[-1]:
            kept.append(mine)
    return out


@pytest.mark.parametrize("similarity", [0.3, 0.5, 0.7, 0.75, 1.0])
def test_the_filter_finds_exactly_the_near_duplicates(similarity: float) -> None:
    rng = random.Random(0)
    texts = [" ".join(rng.choices("abcdefgh", k=rng.randint(4, 12))) for _ in range(60)]
    for _ in range(300):  # most are earlier ones with a word or two changed
        changed = rng.choice(texts).split()
        for _ in range(rng.randint(0, 3)):
            changed[rng.randrange(len(changed))] = rng.choice("abcdefghij")
        texts.append(" ".join(changed))
    expected = naive(texts, similarity)
    assert different(texts, similarity) == expected
    assert 20 < expected.count(False) < 350


def test_the_filter_compares_few_of_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of words as frequent as in English: a few comparisons each; 100,000 of them take seconds."""
    rng = random.Random(0)
    vocabulary, weights = [f"w{i}" for i in range(20000)], [1 / (i + 3) for i in range(20000)]
    starts = ["can you please tell me", "what is the", "write a short story about the", "how do i make a"]
    texts = [
        f"{rng.choice(starts)} {' '.join(rng.choices(vocabulary, weights, k=rng.randint(4, 20)))}" for _ in range(3000)
    ]
    plain, compared = invention._similar, 0

    def counting(*arguments: Any) -> bool:
        nonlocal compared
        compared += 1
        return plain(*arguments)

    monkeypatch.setattr(invention, "_similar", counting)
    assert different([*texts, *texts[:50]], 0.7).count(False) >= 50
    assert 50 <= compared < 20 * len(texts)  # of four and a half million pairs


def test_case_marks_and_scripts_without_spaces_do_not_hide_a_near_duplicate() -> None:
    texts = [
        "What is the capital of France?",
        "what is the capital of france",
        "日本の首都はどこですか",
        "日本の首都はどこですか?",
        "What?",
    ]
    assert different(texts, 0.7) == [True, False, True, False, True]


@pytest.fixture(scope="module")
def target(toy_folder: Path) -> Target:
    found = load(toy_folder)
    found.eos_ids = (*found.eos_ids, *range(3, 320, 32))
    return found


def test_prompts_are_invented_until_there_are_enough_or_three_times_as_many_were_tried(
    target: Target, tmp_path: Path
) -> None:
    settings = Settings(sampler=Sampler(), max_new=40, batch_size=4)
    enough = invent(target, 8, tmp_path / "a", settings)
    assert len(enough.conversations) == 8 and int(enough.account.split()[0]) <= 24
    names = [conversation.id for conversation in enough.conversations]
    assert names == sorted(names) and names[-1] > "self-00007"  # some of the first eight were no use
    none = Settings(sampler=Sampler(), max_new=6, batch_size=4)  # hardly one ends within six tokens and is long enough
    with pytest.raises(ValueError, match="invented no usable prompt in 6 tries"):
        invent(target, 2, tmp_path / "b", none)


def test_what_was_tried_is_accounted_for(target: Target, tmp_path: Path) -> None:
    account = invent(target, 20, tmp_path / "a", Settings(sampler=Sampler(), max_new=40, batch_size=8)).account
    tried, *rest = [int(word) for word in account.split() if word.isdigit()]
    assert tried == sum(rest) and "unfinished" in account and "too short" in account


@pytest.mark.parametrize("diversity", [0.0, 1.1])
def test_a_similarity_out_of_range_is_refused(diversity: float, target: Target, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give a similarity above 0, at most 1"):
        invent(target, 2, tmp_path / "a", Settings(sampler=Sampler()), diversity=diversity)
