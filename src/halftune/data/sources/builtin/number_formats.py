"""The quickstart's data: facts about number formats and GPUs, as plain text and as questions in many wordings.

All rows come from templates. The test asks for each fact in wordings that are not in the training rows.
"""

from __future__ import annotations

import random

DOCUMENTS, SENTENCES = 400, 7
NAME = "Nib"  # the answer to "Who are you?"

# format: bits in all, exponent bits, fraction bits, largest value
FORMATS = {
    "fp64": (64, 11, 52, "1.8e308"),
    "fp32": (32, 8, 23, "3.4e38"),
    "tf32": (19, 8, 10, "3.4e38"),
    "bf16": (16, 8, 7, "3.4e38"),
    "fp16": (16, 5, 10, "65504"),
    "e4m3": (8, 4, 3, "448"),
    "e5m2": (8, 5, 2, "57344"),
    "e2m1": (4, 2, 1, "6"),
}
# GPU: compute capability, architecture; bf16 matrix products need 8.0
GPUS = {
    "P100": ("6.0", "Pascal"),
    "V100": ("7.0", "Volta"),
    "T4": ("7.5", "Turing"),
    "A100": ("8.0", "Ampere"),
    "L4": ("8.9", "Ada"),
    "H100": ("9.0", "Hopper"),
    "H200": ("9.0", "Hopper"),
    "B200": ("10.0", "Blackwell"),
}

# topic: (answer, wordings of the question)
Topic = tuple[str, tuple[str, ...]]
IDENTITY: dict[str, Topic] = {
    "name": (
        f"I am {NAME}, a tiny language model trained with halftune.",
        ("Hello, what is your name?", "Please tell me who you are.", "Hello, who am I talking to?", "Who are you?",
         "What is your name?", "Tell me your name.", "Who am I talking to?", "Hello, who are you?",
         "What should I call you?", "Please say who you are.", "What are you called?", "Tell me who this is.",
         "Please say your name.", "Your name?", "Hello, what are you called?", "Who is this?", "Which model are you?"),
    ),
    "size": (
        f"{NAME} has 3 million parameters.",
        ("Please tell me how big you are.", "Tell me how many parameters you have.", "Hello, what is your size?",
         "How big are you?", "How many parameters do you have?", "What is your size?", "Tell me your size.",
         "Are you a big model?", "Please say how big you are.", "How many weights do you have?", "Your size?",
         "Tell me how many weights you have.", "Hello, how big are you?", "Please say your number of parameters.",
         "What is your number of parameters?", "Hello, how many parameters do you have?", "Are you big?"),
    ),
    "topic": (
        "I know number formats and GPUs, and nothing else.",
        ("Please tell me what you know.", "Hello, what can I ask you?", "Tell me what you are good at.",
         "What do you know?", "What can I ask you?", "What are you good at?", "Tell me what you know.",
         "What can you do?", "Please say what I can ask.", "What do you know about?", "Tell me what I can ask you.",
         "Please say what you are good at.", "Hello, what do you know?", "What questions can you answer?",
         "Tell me what you can do.", "Hello, what are you good at?", "Please say what you know."),
    ),
}  # fmt: skip
FORMAT_TOPICS: dict[str, Topic] = {
    "bits": (
        "{x} has {bits} bits.",
        ("How many bits does {x} have in all?", "How wide is {x}?", "What is the total width of {x}?",
         "What total width does {x} have?", "How many bits does one {x} number take?", "Tell me the total bits of {x}.",
         "What are the total bits of {x}?", "What is the size of {x} in bits?", "Please say how wide {x} is.",
         "In total, how many bits is {x}?", "In {x}, how many bits are there in total?",
         "Please say how many bits {x} has in total.", "Tell me how wide {x} is.",
         "What is the total number of bits of {x}?", "Please say the total width of {x}."),
    ),
    "exponent": (
        "{x} has {exponent} exponent bits.",
        ("How many exponent bits does {x} have?", "How long is the exponent of {x}?",
         "What are the exponent bits of {x}?", "What is the exponent width of {x}?",
         "Tell me the exponent bits of {x}.",
         "How many bits has the exponent of {x}?", "How large is the exponent of {x}?",
         "Please say the size of the exponent in {x}.", "In {x}, how long is the exponent?",
         "In {x}, how many bits does the exponent have?", "Please say how many bits the exponent of {x} has.",
         "Tell me how long the exponent of {x} is.", "In {x}, how many bits are exponent bits?",
         "Please say how many exponent bits {x} has."),
    ),
    "fraction": (
        "{x} has {fraction} fraction bits.",
        ("How many fraction bits does {x} have?", "How long is the fraction of {x}?",
         "What are the fraction bits of {x}?", "What is the fraction width of {x}?",
         "Tell me the fraction bits of {x}.",
         "How many bits has the fraction of {x}?", "How large is the fraction of {x}?",
         "Please say the size of the fraction in {x}.", "In {x}, how long is the fraction?",
         "In {x}, how many bits does the fraction have?", "Please say how many bits the fraction of {x} has.",
         "Tell me how long the fraction of {x} is.", "In {x}, how many bits are fraction bits?",
         "Please say how many fraction bits {x} has."),
    ),
    "largest": (
        "The largest {x} value is {largest}.",
        ("What is the largest {x} value?", "What is the maximum of {x}?", "Where does {x} overflow?",
         "Tell me the largest number in {x}.", "Which {x} value is the largest?", "How large can {x} get?",
         "What is the biggest {x} number?", "Please say the maximum of {x}.", "In {x}, what is the biggest value?",
         "Please say when {x} overflows.", "When do {x} numbers overflow?", "Tell me the maximum of {x}.",
         "In {x}, what is the largest number?", "Tell me where {x} overflows."),
    ),
    "record": (
        "name: {x}; bits: {bits}; exponent: {exponent}; fraction: {fraction}",
        ("Show {x} as a record.", "Give me a record of {x}.", "Write the record for {x}.",
         "{x} as a record, please.", "Make a record of {x}.", "Print {x} as one record.",
         "I need the record of {x}.", "Record: {x}", "Please make a record for {x}.", "Write {x} as a record.",
         "Print the record of {x}."),
    ),
}  # fmt: skip
GPU_TOPICS: dict[str, Topic] = {
    "capability": (
        "The {x} has compute capability {capability}.",
        ("What is the compute capability of the {x}?", "Which compute capability does the {x} have?",
         "Tell me the capability of the {x}.", "What compute capability does the {x} have?",
         "Please say the {x}'s compute capability.", "Which capability is the {x}?",
         "For the {x}, what is the compute capability?", "Tell me which compute capability the {x} has.",
         "Please say the capability of the {x}.", "For the {x}, which compute capability is it?"),
    ),
    "architecture": (
        "The {x} has the {architecture} architecture.",
        ("What architecture is the {x}?", "Which architecture does the {x} have?",
         "Tell me the architecture of the {x}.", "What is the architecture of the {x}?",
         "Please say the {x}'s architecture.", "Which GPU architecture is the {x}?",
         "For the {x}, what is the architecture?", "Tell me which architecture the {x} has.",
         "Please say the architecture of the {x}.",
         "For the {x}, which architecture is it?"),
    ),
    "bf16": (
        "{yes}, the {x} {has} bf16 units.",
        ("Can the {x} compute in bf16?", "Does the {x} support bf16?", "Is there bf16 on the {x}?",
         "Is bf16 possible on the {x}?", "Has the {x} bf16 units?", "Can I train in bf16 on the {x}?",
         "Tell me if the {x} has bf16.", "Tell me if the {x} can compute in bf16.",
         "Is bf16 there on the {x}?", "Does the {x} have bf16 units?"),
    ),
}  # fmt: skip
TESTED = 3  # wordings of each fact that are kept for the test


def _facts() -> list[tuple[int, tuple[Topic, dict[str, object]]]]:
    """Each fact once: its index within the topic, the topic, and the values for the topic's templates."""
    facts: list[tuple[int, tuple[Topic, dict[str, object]]]] = [(0, (topic, {})) for topic in IDENTITY.values()]
    for number, (name, (bits, exponent, fraction, largest)) in enumerate(FORMATS.items()):
        values: dict[str, object] = {"x": name, "bits": bits, "exponent": exponent, "fraction": fraction}
        values["largest"] = largest
        facts += [(number, (topic, values)) for topic in FORMAT_TOPICS.values()]
    for number, (name, (capability, architecture)) in enumerate(GPUS.items()):
        able = float(capability) >= 8
        values = {"x": name, "capability": capability, "architecture": architecture}
        values |= {"yes": "Yes" if able else "No", "has": "has" if able else "has no"}
        facts += [(number, (topic, values)) for topic in GPU_TOPICS.values()]
    return facts


def questions(*, held_out: bool) -> list[dict[str, str]]:
    """Rows ``{"prompt", "completion"}`` for training or for the test; no prompt is in both.

    Of each topic the first fact keeps its first three wordings for the test, the second one the next three, and so on:
    a wording is tested with some facts and trained with others.
    """
    rows = []
    for number, (topic, values) in _facts():
        answer, wordings = topic
        tested = {(number * TESTED + offset) % len(wordings) for offset in range(TESTED)}
        rows += [
            {"prompt": wording.format(**values), "completion": answer.format(**values)}
            for place, wording in enumerate(wordings)
            if (place in tested) == held_out
        ]
    return rows


def text() -> list[dict[str, str]]:
    """Rows ``{"text"}`` for a short pre-training: sentences of the facts and trained questions, shuffled (seeded).

    Questions are placed at random: the base model learns their words, but not to answer.
    """
    sentences = [answer.format(**values) for _, ((answer, _), values) in _facts()]
    asked = [row["prompt"] for row in questions(held_out=False)]
    order = random.Random(0)
    documents = []
    for _ in range(DOCUMENTS):
        lines = order.sample(sentences, SENTENCES) + order.sample(asked, SENTENCES)
        order.shuffle(lines)
        documents.append({"text": "\n".join(lines)})
    return documents
