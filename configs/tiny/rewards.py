"""Rewards for configs/tiny/grpo.yaml. Copy the file, and write your own."""


def vowels(completions, **_):
    """The share of an answer's characters that are vowels.

    Args:
        completions: the model's answers, texts.

    Returns:
        a number for each answer; None where the function has nothing to say.
    """
    return [sum(letter in "aeiou" for letter in one.lower()) / max(len(one), 1) for one in completions]


def short(completions, **_):
    """1 for an answer of at most 20 characters, 0 from 200 on."""
    return [min(1.0, max(0.0, (200 - len(one)) / 180)) for one in completions]
