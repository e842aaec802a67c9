"""trainer/data/read/preferences.py: comparisons in the shapes that data sets on the Hub have."""

import pytest

from conf.schema.data import Part
from trainer.data.read import shapes
from trainer.data.rows import Bad


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def talk(*texts: str) -> list[dict[str, str]]:
    return [said(("user", "assistant")[number % 2], text) for number, text in enumerate(texts)]


def read(row: dict, shape: str = "auto", **keys):
    part = Part(source="rows", shape=shape, **keys)
    return shapes.detect(part, [row], "rows").row(row)


def both(one, other) -> dict:
    return {"chosen": one, "rejected": other}


def pair(question: str, one: str, other: str) -> dict:
    return both(*({"input": question, "output": answer} for answer in (one, other)))


def talks(one: list, other: list) -> dict:
    return both({"messages": one}, {"messages": other})


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, pair("2+2?", "4", "5")),
        ({"prompt": "2+2? ", "chosen": "2+2? 4", "rejected": "2+2? 5"}, pair("2+2? ", "4", "5")),
        ({"chosen": "The sky is blue.", "rejected": "The sky is green."}, pair("The sky is ", "blue.", "green.")),
        (  # Intel/orca_dpo_pairs
            {"system": "Be brief.", "question": "2+2?", "chosen": "4", "rejected": "5"},
            talks(*([said("system", "Be brief."), *talk("2+2?", answer)] for answer in "45")),
        ),
        (  # trl-lib/ultrafeedback_binarized
            {"chosen": talk("2+2?", "4"), "rejected": talk("2+2?", "5"), "score_chosen": 9.0},
            talks(talk("2+2?", "4"), talk("2+2?", "5")),
        ),
        (  # an explicit prompt of messages
            {"prompt": talk("2+2?"), "chosen": [said("assistant", "4")], "rejected": [said("assistant", "5")]},
            talks(talk("2+2?", "4"), talk("2+2?", "5")),
        ),
        (  # Anthropic/hh-rlhf
            {
                "chosen": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: 2+2?\n\nAssistant: 4",
                "rejected": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: 2+2?\n\nAssistant: 5",
            },
            talks(talk("Hi", "Hello", "2+2?", "4"), talk("Hi", "Hello", "2+2?", "5")),
        ),
        (  # Alpaca's columns, as LLaMA-Factory has them
            {"instruction": "Add.", "input": "2+2", "chosen": "4", "rejected": "5"},
            pair("Add.\n\n2+2", "4", "5"),
        ),
        (  # answers that are one message each
            {"prompt": "2+2?", "chosen": said("assistant", "4"), "rejected": said("assistant", "5")},
            talks(talk("2+2?", "4"), talk("2+2?", "5")),
        ),
    ],
)
def test_each_shape_is_read(row, found):
    assert read(row) == found


def test_a_set_that_can_be_read_in_another_way_is_asked_for_by_its_shape():
    row = {"prompt": "2+2?", "messages": talk("2+2?", "4"), "chosen": talk("2+2?", "4"), "rejected": talk("2+2?", "5")}
    assert read(row) == {"messages": talk("2+2?", "4")}
    assert read(row, "preference") == talks(talk("2+2?", "4"), talk("2+2?", "5"))
    turns = [{"from": "human", "value": "2+2?"}]  # LLaMA-Factory's, of ShareGPT's columns
    answers = both(*({"from": "gpt", "value": answer} for answer in "45"))
    assert read({"conversations": turns, **answers}, "preference") == talks(talk("2+2?", "4"), talk("2+2?", "5"))
    binarized = {"messages": talk("2+2?", "4"), "chosen": "2+2? 4", "rejected": "2+2? 5"}
    assert read(binarized, "preference") == pair("2+2? ", "4", "5"), "a conversation that ends with an answer"
    asked = {"ask": "2+2?", "text": "no", "chosen": "4", "rejected": "5"}
    assert read(asked, "preference", input="ask") == pair("2+2?", "4", "5")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "2+2?", "chosen": "4", "rejected": "4"}, "both answers are equal"),
        ({"chosen": talk("2+2?", "4"), "rejected": talk("3+3?", "5")}, "answers to different prompts"),
        ({"chosen": "Blue.", "rejected": "Green."}, "no prompt"),
        ({"prompt": "2+2?", "chosen": "4", "rejected": ""}, "empty answer"),
    ],
)
def test_rows_that_compare_nothing_are_bad(row, reason):
    found = read(row)
    assert isinstance(found, Bad) and found.reason == reason
